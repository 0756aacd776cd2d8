"""What tests of the tracking share: a writer of run folders, W&B's reader, a small W&B server."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
from wandb.util import get_core_path

sys.path.append(str(Path(__file__).parent))

from warm_workers import WORKER, ForkedWorker, WarmWorkers

from batchscape.config import RunConfig, WandbTracker
from batchscape.geometry import BatchGeometry
from batchscape.record.files import JsonLines, write_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import DataIdentity, RunSpec, Stage
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.record.tables import read_table, seal
from batchscape.tracking import mirror as mirrors
from batchscape.tracking.mirror import Mirror
from batchscape.tracking.run import AXES, CURVES

KEY = "0123456789abcdef0123456789abcdef01234567"
EVERY = 4  # optimizer steps between evaluations


def run_config() -> RunConfig:
    return RunConfig.from_mapping(
        {
            "batch": {"data_parallel_size": 2, "micro_batch_size": 8, "global_batch_size": 32},
            "model": {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32},
            "data": {"name": "stdlib"},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": 12},
            "evaluation": {"every_samples": EVERY * 32},
            "engine": {"name": "ddp"},
            "loader": {},
            "checkpoint": {},
            "measure": {},
            "launcher": {"name": "local"},
            "tracker": {"name": "none"},
            "seed": 3,
        }
    )


@dataclass
class FakeTraining:
    """Writes a run folder as the launcher and rank 0 do, with numbers of its own."""

    sweep: SweepFolder
    run_id: str
    core_wait_s: float = 0.001

    def __post_init__(self) -> None:
        self.folder = self.sweep.run(self.run_id)
        self.status = RunStatus(Status.PENDING)
        RunSpec(
            run_id=self.run_id,
            trajectory_id="t1",
            sweep_name="fixed_global_batch",
            stages=(Stage(384, BatchGeometry(1, 2, 8, 2), run_config().optimizer),),
            device_type="cpu",
            precision="float32",
            evaluation_every_samples=EVERY * 32,
            data=DataIdentity("hash", "/data", 1000, 100, 256, "next_token"),
            config=run_config(),
        ).write(self.folder.config)
        self.status.write(self.folder.status)

    def begin(self, after: int = 0) -> None:
        """Start an attempt that goes on after an optimizer step."""
        self.status.status, self.status.reason = Status.RUNNING, None
        self.status.attempts.append(Attempt(time.time(), after))
        write_json(
            self.folder.launch,
            {"attempt": len(self.status.attempts) - 1, "timing_valid": True, "rendezvous": "/x"},
        )
        for table in ("steps", "evals"):
            kept = read_table(self.folder, table).to_dict("records")
            self.folder.parquet(table).unlink(missing_ok=True)
            self.folder.lines(table).unlink(missing_ok=True)
            self._append(table, [row for row in kept if row["optimizer_step"] <= after])
        self.status.write(self.folder.status)

    def train(self, steps: Iterable[int], nan_at: int = -1) -> None:
        """Write optimizer steps, and the evaluations that come with them."""
        for k in steps:
            if k == 1:
                self._evaluate(0)
            loss = math.nan if k == nan_at else 5.0 / k
            self._append("steps", [self._progress(k) | self._step(k, loss)])
            if k % EVERY == 0:
                self._evaluate(k)

    def end(self, status: Status, reason: str | None = None) -> None:
        self.status.status, self.status.reason = status, reason
        self.status.stop_reason = StopReason.BUDGET if status is Status.COMPLETED else None
        self.status.attempts[-1].ended_at = time.time()
        attempt = len(self.status.attempts) - 1
        for rank, peak_gib in enumerate((0.25, 0.5)):
            memory = {"peak_allocated_gib": peak_gib, "peak_allocated_steady_gib": peak_gib}
            self._append("ranks", [{"rank": rank, "attempt": attempt, **memory}])
        seal(self.folder, self.status, data_parallel_size=2)

    def _evaluate(self, k: int) -> None:
        row = {"attempt": 0, "eval_loss": 6.0 / (k + 1), "eval_labels": 64, "evaluation_s": 0.5}
        self._append("evals", [self._progress(k) | row])

    def _append(self, table: str, rows: Iterable[Mapping[Any, Any]]) -> None:
        lines = JsonLines(self.folder.lines(table))
        lines.append({k: None if v is pd.NA else v for k, v in row.items()} for row in rows)
        lines.close()

    def _progress(self, k: int) -> dict[str, Any]:
        return {
            "optimizer_step": k,
            "samples": 32 * k,
            "tokens": 2048 * k,
            "train_time_s": 0.125 * k,
        }

    def _step(self, k: int, loss: float) -> dict[str, Any]:
        return {
            "attempt": len(self.status.attempts) - 1,
            "loss": loss,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0 / k,
            "step_time_s": 0.125,
            "data_s": 0.01,
            "forward_backward_s": 0.1,
            "exchange_s": 0.005,
            "optimizer_s": 0.01,
            "exchange_span_s": 0.02,
            "exchanged_bytes": 4096,
            "skipped": k == 2,
            "small_batch_size": 8 if k % 3 == 0 else None,
            "small_gradient_square": 3.0 if k % 3 == 0 else None,
            "global_batch_size": 32,
            "involuntary_switches": 0,
            "core_wait_s": self.core_wait_s,
            "processor_time_s": 0.03125,
            "warmup": k < 3,
        }


@dataclass
class Segment:
    """What W&B's own reader finds in one of its files."""

    records: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def history(self) -> list[dict[str, Any]]:
        return [record["item"] for record in self.of("history")]

    @property
    def summary(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for record in self.of("summary"):
            merged |= record.get("update", {})
            for item in record.get("remove", ()):
                merged.pop(item.get("key") or item["nested_key"][0], None)
        return merged

    @property
    def tags(self) -> list[str]:
        tags: list[str] = self.of("run")[-1]["tags"]
        return tags


def segment_in(path: Path) -> Segment:
    (file,) = path.glob("*.wandb")
    # What `wandb leet inspect --json` runs, without its slow start.
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    command += ["--run-file", str(file), str(path.parent)]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    return Segment([json.loads(line) for line in read.stdout.splitlines()])


def segments(folder: RunFolder) -> list[Segment]:
    """Read what W&B wrote offline for a run."""
    wandb = SweepFolder(folder.path.parents[1]).wandb
    return [segment_in(path) for path in sorted(wandb.glob(f"offline-run-*-{folder.path.name}-*"))]


def expected_history(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the folder under their W&B names, in the order in which they came to be."""
    rows = []
    for table, names in CURVES.items():
        frame = read_table(folder, table)
        for row in frame.to_dict("records"):
            kept = {name: row[name] for name in AXES}
            kept |= {new: row[old] for old, new in names.items()}
            if table == "steps":
                kept["throughput/samples_per_s"] = row["global_batch_size"] / row["step_time_s"]
            present = {name: value for name, value in kept.items() if not pd.isna(value)}
            rows.append(((row["optimizer_step"], table == "evals"), present))
    return [row for _, row in sorted(rows, key=lambda keyed: keyed[0])]


def curves_of(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what W&B adds."""
    return [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in rows
    ]


def check_history(folder: RunFolder) -> Segment:
    """Compare all rows in W&B with the folder's; return the segment that they are in."""
    (segment,) = segments(folder)
    assert curves_of(segment.history) == expected_history(folder)
    return segment


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("batchscape.tracking.state.can_save_workspaces", lambda: False)
    return SweepFolder(tmp_path / "sweep")


@pytest.fixture
def silent_server(
    sweep: SweepFolder,  # noqa: ARG001  (it clears the environment first)
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[socket.socket]:
    """A server that accepts connections and never answers; all that W&B might use leads there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, address)
        server.setblocking(False)
        yield server


@dataclass
class FakeRun:
    """What the server has of one run."""

    settings: dict[str, Any] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    state: str = "running"
    lines_received: int = 0
    files: set[str] = field(default_factory=set)
    """Names of what was uploaded beside its rows."""

    @property
    def visible_history(self) -> list[dict[str, Any]]:
        return curves_of(json.loads(line) for line in self.history)

    @property
    def last_row(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.history[-1])
        return row


@dataclass
class FakeArtifact:
    """What the server has of one version of an artifact."""

    type: str
    name: str
    digest: str
    files: set[str] = field(default_factory=set)
    state: str = "PENDING"


class FakeServer(ThreadingHTTPServer):
    """As much of a W&B server as runs need: it keeps lines where the client wants them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs: dict[str, FakeRun] = {}
        self.artifacts: list[FakeArtifact] = []
        self.views: list[dict[str, Any]] = []
        """Saved workspaces."""
        self.contents: list[bytes] = []
        """Of files, as they arrived."""
        self.hangs = False
        """Whether no request is answered."""
        self.refused: dict[str, int] = {}
        """HTTP status for rows of runs whose id has the given beginning."""
        self.is_over = threading.Event()
        """Lets go of those who hang."""
        self.on_complete: Callable[[str], None] | None = None
        """Called with the name of a run whose end has just arrived, before that is answered."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed leaves connections behind."""

    def run_of(self, run_id: str) -> FakeRun:
        """The one W&B run of a run folder."""
        (run,) = (run for name, run in self.runs.items() if name.startswith(f"{run_id}-"))
        return run

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "E", "name": variables.get("entity") or "me"}
        project = {"id": "P", "name": variables.get("project"), "entity": entity}
        viewer = {"viewer": {"id": "U", "name": "me", "username": "me", "entity": "me"}}
        if "Artifact" in operation:
            return self._answer_artifact(operation, variables)
        name = variables.get("name") or str(variables.get("id") or "").removeprefix("R:")
        exists = name in self.runs
        run = self.runs.get(name) or FakeRun()
        if operation == "UpsertBucket":
            self.runs[name] = run
            if variables.get("name"):
                run.settings |= {
                    name: value for name, value in variables.items() if value is not None
                }
                run.state = "running"
            else:  # by its id: the public interface changes a run that has ended
                run.summary = json.loads(variables["summaryMetrics"])
        bucket = {
            "id": f"R:{name}",
            "name": name,
            "project": project,
            "config": run.settings.get("config", "{}"),
            "tags": run.settings.get("tags"),
            "wandbConfig": '{"t": 1}',
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.history),
            "historyTail": json.dumps(run.history[-1:]),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "state": run.state,
            "projectId": "1",
        }
        uploads = [{"name": n, "uploadUrl": self.url} for n in variables.get("files", [])]
        if operation == "CreateRunFiles":
            self.runs[variables["run"]].files.update(variables["files"])
        if operation == "UpsertView2":
            self.views.append(variables)
        answers: dict[str, dict[str, Any]] = {
            "UpsertView2": {"upsertView": {"view": {"id": "V", "name": name}, "inserted": True}},
            "Viewer": viewer,
            "GetDefaultEntity": viewer,
            "Run": {"project": {"internalId": "1", "run": bucket if exists else None}},
            "RunResumeStatus": {"model": project | {"bucket": bucket if exists else None}},
            "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": not exists}},
            "CreateRunFiles": {
                "createRunFiles": {"runID": "R", "uploadHeaders": [], "files": uploads}
            },
        }
        return answers.get(operation, {})

    def _answer_artifact(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        values = variables.get("input") or variables
        if operation == "CreateArtifact":
            key = (values["artifactTypeName"], values["artifactCollectionName"], values["digest"])
            artifacts = [a for a in self.artifacts if (a.type, a.name, a.digest) == key]
            if not artifacts:
                artifacts = [FakeArtifact(*key)]
                self.artifacts += artifacts
            id_ = str(self.artifacts.index(artifacts[0]))
            sequence = {"id": "S", "latestArtifact": None}
            created = {"id": id_, "state": artifacts[0].state, "artifactSequence": sequence}
            return {"createArtifact": {"artifact": created}}
        file = {"id": "F", "displayName": "f", "uploadUrl": self.url, "uploadHeaders": []}
        if operation == "CreateArtifactManifest":
            return {
                "createArtifactManifest": {
                    "artifactManifest": {"id": "M", "file": {**file, "name": "manifest"}}
                }
            }
        if operation == "CreateArtifactFiles":
            edges = []
            for entry in values["artifactFiles"]:
                self.artifacts[int(entry["artifactID"])].files.add(entry["name"])
                artifact = {"id": entry["artifactID"]}
                edges.append({"node": {**file, "name": entry["name"], "artifact": artifact}})
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation == "CommitArtifact":
            self.artifacts[int(values["artifactID"])].state = "COMMITTED"
            return {"commitArtifact": {"artifact": {"id": values["artifactID"], "digest": "d"}}}
        if operation == "ArtifactByID":
            return {"artifact": self._fragment(values["id"])}
        return {"project": {"artifact": None}}

    def _fragment(self, id_: str) -> dict[str, Any]:
        """All that the library asks of an artifact."""
        artifact = self.artifacts[int(id_)]
        entity = {"name": "me"}
        project = {"id": "P", "internalId": "1", "name": "geometry", "entity": entity}
        collection = {"__typename": "ArtifactSequence", "name": artifact.name, "project": project}
        missing = ("description", "metadata", "historyStep", "commitHash", "updatedAt")
        return {
            **dict.fromkeys(missing),
            "id": id_,
            "artifactSequence": {"id": "S", **collection},
            "versionIndex": 0,
            "artifactType": {"name": artifact.type},
            "ttlDurationSeconds": -1,
            "ttlIsInherited": False,
            "tags": [],
            "state": artifact.state,
            "size": 1,
            "digest": artifact.digest,
            "fileCount": len(artifact.files),
            "createdAt": "2026-01-01T00:00:00",
        }

    def stream(self, name: str, message: dict[str, Any]) -> int:
        """Take rows in; return the HTTP status."""
        for beginning, status in self.refused.items():
            if name.startswith(beginning):
                return status
        run = self.runs[name]
        for file, part in (message.get("files") or {}).items():
            if file == "wandb-history.jsonl":
                at = part["offset"]
                run.history[at : at + len(part["content"])] = part["content"]
                run.lines_received += len(part["content"])
            elif file == "wandb-summary.json":
                run.summary = json.loads(part["content"][-1])
        if message.get("complete"):
            run.state = "finished" if message["exitcode"] == 0 else "failed"
            if self.on_complete is not None:
                self.on_complete(name)
        return 200


class _Answers(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        answer, status = {}, 200
        if self.command == "PUT":
            self.server.contents.append(content)
        if self.server.hangs:
            self.server.is_over.wait()
            self.close_connection = True
            return
        if self.path == "/graphql":
            key = base64.b64decode(self.headers["Authorization"].split()[-1]).decode()
            if key == f"api:{KEY}":
                request = json.loads(content)
                (operation,) = re.findall(r"^\s*(?:query|mutation)\s+(\w+)", request["query"], re.M)
                answer = {"data": self.server.answer(operation, request.get("variables") or {})}
            else:
                status = 401
        elif self.path.endswith("/file_stream"):
            status = self.server.stream(self.path.split("/")[-2], json.loads(content))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_PUT = do_POST  # noqa: N815  (the name that the library looks for)

    def log_message(self, *_: object) -> None:
        """Requests are not printed."""


@pytest.fixture
def server(sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:  # noqa: ARG001
    with FakeServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def fake_training(sweep: SweepFolder) -> Callable[..., FakeTraining]:
    """Makes run folders with numbers of their own, of one sweep."""

    def make(run_id: str, **settings: Any) -> FakeTraining:
        return FakeTraining(sweep, run_id, **settings)

    return make


@pytest.fixture
def mirrored(sweep: SweepFolder) -> Callable[[WandbTracker], str | None]:
    """Mirrors all runs as at the end of a launch; returns its note."""

    def mirror(tracker: WandbTracker) -> str | None:
        return Mirror(tracker, sweep, live=False).finish(interrupted=False)

    return mirror


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> Iterator[list[WarmWorkers]]:
    """Fork what talks to W&B for mirrors of this process, see `WarmWorkers`."""
    warm: list[WarmWorkers] = []

    def start(command: list[str], **options: Any) -> ForkedWorker:
        if not warm:
            warm.append(WarmWorkers())
        return warm[0].start(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
        yield warm
    for one in warm:
        one.close()


@pytest.fixture
def workers(warm_workers: list[WarmWorkers]) -> Callable[[], list[psutil.Process]]:
    """Finds the living processes that talk to W&B for this one; there is one."""

    def found() -> list[psutil.Process]:
        living: list[psutil.Process] = []
        deadline = time.monotonic() + 10.0
        # A process has no command line for the first moment of its program.
        while not living and time.monotonic() < deadline:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    is_warm = child.pid in {warm.pid for warm in warm_workers}
                    # One that was forked has the command line of the process that it is from.
                    names = " ".join(child.cmdline())
                    if not is_warm and (WORKER in names or "warm_workers" in names):
                        living.append(child)
        return living

    return found


@pytest.fixture
def open_rows() -> Callable[[RunFolder], list[dict[str, Any]]]:
    """Reads the rows of a run that is open offline; none where it is not."""

    def read(folder: RunFolder) -> list[dict[str, Any]]:
        wandb = SweepFolder(folder.path.parents[1]).wandb
        copies = [path for path in wandb.glob("offline-run-*") if folder.path.name in path.name]
        return segment_in(copies[-1]).history if copies and any(copies[-1].glob("*.wandb")) else []

    return read


@pytest.fixture
def checked_segment() -> Callable[[RunFolder], Segment]:
    """Reads what W&B wrote offline for a run, and compares all its rows with the folder's."""
    return check_history


@pytest.fixture
def rows_of() -> Callable[[RunFolder], list[dict[str, Any]]]:
    """What the history in W&B has to be."""
    return expected_history


@pytest.fixture
def settings_of_run() -> dict[str, Any]:
    """Settings of every run folder that these tests make."""
    return run_config().to_mapping()
