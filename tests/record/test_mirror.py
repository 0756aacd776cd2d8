"""The mirror, against W&B's own writer and W&B's own reader, without a network.

Long because a run folder's writers and a small W&B server come first; the tests follow them.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from wandb.util import get_core_path

from batchscape.config import RunConfig, WandbTracker
from batchscape.geometry import BatchGeometry
from batchscape.record import mirror
from batchscape.record.columns import COLUMNS
from batchscape.record.files import JsonLines, write_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.mirror import MirrorState
from batchscape.record.spec import DataIdentity, RunSpec, Stage
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.record.tables import read_table, seal
from batchscape.record.wandb_run import AXES, METRICS, NOT_MIRRORED

OFFLINE = WandbTracker(name="wandb", mode="offline", project="geometry", tags=["paper"])
KEY = "0123456789abcdef0123456789abcdef01234567"
EVERY = 4  # optimizer steps between evaluations
TIMEOUT_S = 100.0


def run_config() -> RunConfig:
    return RunConfig.from_mapping(
        {
            "batch": {"devices_per_node": 2, "micro_batch_size": 8, "global_batch_size": 32},
            "model": {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32},
            "data": {"name": "stdlib"},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
            "schedule": {"name": "constant"},
            "budget": {"optimizer_steps": 12},
            "evaluation": {"every_samples": EVERY * 32},
            "engine": {"name": "ddp"},
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
            data=DataIdentity("hash", "/data", 1000, 100, 256, task="next_token"),
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
        self._append("ranks", [{"rank": 0, "attempt": 0, "peak_allocated_gib": 0.25}])
        seal(self.folder, self.status, data_parallel_size=2)

    def _evaluate(self, k: int) -> None:
        row = {"attempt": 0, "eval_loss": 6.0 / (k + 1), "eval_targets": 64, "evaluation_s": 0.5}
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
            "exchange_optimizer_s": 0.015,
            "exchanged_bytes": 4096,
            "involuntary_switches": 0,
            "core_wait_s": 0.001,
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

    def reaches(self, optimizer_step: int) -> bool:
        return any(row["optimizer_step"] >= optimizer_step for row in self.history)

    @property
    def summary(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for record in self.of("summary"):
            merged |= record["update"]
        return merged

    @property
    def tags(self) -> list[str]:
        found: list[str] = self.of("run")[-1]["tags"]
        return found


def segments(folder: RunFolder) -> list[Segment]:
    state = MirrorState.read(folder)
    assert state is not None
    found = []
    for name in state.segments:
        path = mirror.wandb_folder(folder.path.parent.parent) / name
        (file,) = path.glob("*.wandb")
        # What `wandb leet inspect --json` runs, without its slow start.
        command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
        command += ["--run-file", str(file), str(path.parent)]
        read = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(Segment([json.loads(line) for line in read.stdout.splitlines()]))
    return found


def expected_history(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the folder under their W&B names, in the order in which they came to be."""
    rows = []
    for table, names in METRICS.items():
        for row in read_table(folder, table).to_dict("records"):
            kept = {name: row[name] for name in AXES}
            kept |= {new: row[old] for old, new in names.items()}
            present = {name: value for name, value in kept.items() if not pd.isna(value)}
            rows.append(((row["optimizer_step"], table == "evals"), present))
    return [row for _, row in sorted(rows, key=lambda keyed: keyed[0])]


def check_history(folder: RunFolder) -> list[Segment]:
    """Compare all rows in W&B with the folder's; return the segments that they are in."""
    found = segments(folder)
    history = [
        {name: value for name, value in row.items() if not name.startswith("_")}
        for segment in found
        for row in segment.history
    ]
    assert history == expected_history(folder)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def segments_of(training: FakeTraining) -> list[str]:
    state = MirrorState.read(training.folder)
    return [] if state is None else state.segments


def has_open_segment(training: FakeTraining) -> bool:
    state = MirrorState.read(training.folder)
    return state is not None and not state.closed


def kill(process: mirror.MirrorProcess) -> None:
    helpers = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(helpers)


def files_outside(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return SweepFolder(tmp_path / "sweep")


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server that accepts connections and never answers; all that W&B might use leads there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, address)
        server.setblocking(False)
        yield server


class FakeServer(ThreadingHTTPServer):
    """As much of a W&B server as one run needs: it keeps lines where the client wants them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.run: dict[str, Any] = {}
        self.history: list[str] = []
        self.summary: dict[str, Any] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed leaves connections behind."""

    @property
    def visible_history(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.history]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "P", "name": "p", "entity": {"id": "E", "name": "me"}}
        known = bool(self.run)
        if operation == "UpsertBucket":
            self.run |= {name: value for name, value in given.items() if value is not None}
        bucket = {
            "id": "R",
            "name": given.get("name"),
            "project": project,
            "config": self.run.get("config", "{}"),
            "tags": self.run.get("tags"),
            "wandbConfig": '{"t": 1}',
            "summaryMetrics": json.dumps(self.summary),
            "historyLineCount": len(self.history),
            "historyTail": json.dumps(self.history[-1:]),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
        }
        uploads = [{"name": n, "uploadUrl": self.url} for n in given.get("files", [])]
        answers: dict[str, dict[str, Any]] = {
            "RunResumeStatus": {"model": project | {"bucket": bucket if known else None}},
            "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": not known}},
            "CreateRunFiles": {
                "createRunFiles": {"runID": "R", "uploadHeaders": [], "files": uploads}
            },
        }
        return answers.get(operation, {})

    def stream(self, message: dict[str, Any]) -> None:
        for name, part in (message.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                at = part["offset"]
                self.history[at : at + len(part["content"])] = part["content"]
            elif name == "wandb-summary.json":
                self.summary = json.loads(part["content"][-1])
        if message.get("complete"):
            self.run["exitcode"] = message["exitcode"]


class _Answers(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        answer = {}
        if self.path == "/graphql":
            asked = json.loads(content)
            variables = asked.get("variables") or {}
            answer = {"data": self.server.answer(asked.get("operationName"), variables)}
        elif self.path.endswith("/file_stream"):
            self.server.stream(json.loads(content))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_PUT = do_POST  # noqa: N815  (the name that the library looks for)

    def log_message(self, *_: object) -> None:
        """Requests are not printed."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_column_is_mirrored_or_left_out_on_purpose() -> None:
    for table, names in METRICS.items():
        assert set(COLUMNS[table]) <= set(names) | set(AXES) | NOT_MIRRORED
        assert set(names) | set(AXES) <= set(COLUMNS[table])


def test_offline_mirror_holds_what_the_run_folders_hold(
    sweep: SweepFolder, silent_server: socket.socket, tmp_path: Path
) -> None:
    done, failed, diverged = (FakeTraining(sweep, f"run-{name}") for name in "abc")
    FakeTraining(sweep, "run-pending")
    rejected = FakeTraining(sweep, "run-rejected")
    RunStatus(Status.REJECTED, reason="needs 16 devices").write(rejected.folder.status)
    for training in (done, failed, diverged):
        training.begin()
    done.train(range(1, 13))
    done.end(Status.COMPLETED)
    failed.train(range(1, 8))
    failed.end(Status.FAILED, "rank 1 died")
    diverged.train(range(1, 7), nan_at=6)
    diverged.end(Status.DIVERGED, "the loss is not a number")

    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None

    with pytest.raises(BlockingIOError):
        silent_server.accept()
    assert files_outside(tmp_path / "home") == []
    for training, exit_code in ((done, 0), (failed, 1), (diverged, 1)):
        status = RunStatus.read(training.folder.status)
        (segment,) = check_history(training.folder)
        _check_identity(training, segment)
        assert segment.tags == ["paper", str(status.status)]
        figures = {name: segment.summary[name] for name in status.summary}
        assert figures == status.summary
        assert segment.summary["status"] == str(status.status)
        assert segment.summary["reason"] == status.reason
        assert segment.of("exit")[-1]["exit_code"] == exit_code
    assert "train/loss" not in segment.history[-1]  # of the diverged run
    assert not sweep.run("run-pending").mirror.exists()
    assert not rejected.folder.mirror.exists()

    mirrored = {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    _check_that_a_resumed_run_is_gone_on_with(sweep, failed)
    # Nothing is mirrored twice.
    assert mirrored == {t.run_id: t.folder.mirror.read_bytes() for t in (done, diverged)}
    assert len(list(mirror.wandb_folder(sweep.path).glob("offline-run-*"))) == 4


def _check_identity(training: FakeTraining, segment: Segment) -> None:
    run = segment.of("run")[0]
    assert run["display_name"] == training.run_id
    assert run["run_group"] == "fixed_global_batch"
    assert run["project"] == "geometry"
    config = run["config"]["update"]
    expected = run_config().to_mapping() | {
        "nodes": 1,
        "devices_per_node": 2,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "data_parallel_size": 2,
        "global_batch_size": 32,
        "run_id": training.run_id,
        "trajectory_id": "t1",
        "sweep_name": "fixed_global_batch",
        "data_manifest_hash": "hash",
        "device_type": "cpu",
        "precision": "float32",
        "planned_optimizer_steps": 12,
        "planned_samples": 384,
        "evaluation_every_samples": EVERY * 32,
        "init_seed": 3,
        "data_seed": 3,
        "launch": {"attempt": 0, "timing_valid": True},
    }
    assert {name: value for name, value in config.items() if name != "_wandb"} == expected
    metrics = {metric["name"]: metric for metric in segment.of("metric")}
    assert set(AXES) <= set(metrics)
    axes = {name: metric.get("step_metric") for name, metric in metrics.items()}
    assert axes["train/loss"] == axes["eval/loss"] == "samples"
    assert axes["time/step_time_s"] == "optimizer_step"


def _check_that_a_resumed_run_is_gone_on_with(sweep: SweepFolder, failed: FakeTraining) -> None:
    """It failed at optimizer step 7; the checkpoint is of step 4."""
    failed.begin(after=4)
    failed.train(range(5, 13))
    failed.end(Status.COMPLETED)
    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None
    first, second = check_history(failed.folder)
    assert first.of("run")[0]["run_id"] == second.of("run")[0]["run_id"]
    assert second.of("run")[0]["resume"]
    assert second.tags == ["paper", "completed"]
    assert second.summary["reason"] is None


def test_following_a_run_and_being_killed(
    sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "0.1")
    training = FakeTraining(sweep, "run-a")
    training.begin()
    training.train(range(1, 5))
    process = mirror.start(sweep.path, OFFLINE, live=True)
    assert psutil.Process(process.pid).nice() == 19
    wait_until(lambda: has_open_segment(training))
    training.train(range(5, 9))
    # W&B holds the latest row back, in case more is logged at its step.
    wait_until(lambda: segments(training.folder)[0].reaches(8))
    kill(process)
    assert process.finish(TIMEOUT_S) is None  # no run has ended, so none is lacking
    assert has_open_segment(training)

    cut_short = segments_of(training)
    process = mirror.start(sweep.path, OFFLINE, live=True)
    wait_until(lambda: segments_of(training) != cut_short)
    training.train(range(9, 13))
    training.end(Status.COMPLETED)
    assert process.finish(TIMEOUT_S) is None
    (segment,) = check_history(training.folder)
    assert segment.tags == ["paper", "completed"]


def test_a_dead_launcher_leaves_a_whole_segment(sweep: SweepFolder) -> None:
    training = FakeTraining(sweep, "run-a")
    training.begin()
    training.train(range(1, 6))
    launcher = f"""
import pathlib, sys
from batchscape.config import WandbTracker
from batchscape.record import mirror
tracker = WandbTracker(name="wandb", mode="offline")
process = mirror.start(pathlib.Path({str(sweep.path)!r}), tracker, live=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE) as process:
        wait_until(lambda: has_open_segment(training))
        training.train([6])
        process.kill()
    wait_until(lambda: not has_open_segment(training))
    state = MirrorState.read(training.folder)
    assert state is not None
    assert state.status == "running"
    check_history(training.folder)


def test_unreachable_server_leaves_an_offline_copy(
    sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    training = FakeTraining(sweep, "run-a")
    training.begin()
    training.train(range(1, 13))
    training.end(Status.COMPLETED)
    tracker = WandbTracker(name="wandb")
    said = mirror.start(sweep.path, tracker, live=True).finish(TIMEOUT_S)
    assert said is not None
    assert "1 of 1 runs were written for Weights & Biases offline" in said
    assert "because W&B could not open a run (CommError: " in said
    assert f"wandb sync {sweep.path}/wandb/offline-run-*" in said
    check_history(training.folder)
    for path in sweep.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


def test_hanging_server_no_key_and_a_damaged_run(
    sweep: SweepFolder, silent_server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start is killed at the timeout, the second one mirrors what can be read."""
    for name in ("run-a", "run-b"):
        training = FakeTraining(sweep, name)
        training.begin()
        training.train(range(1, 3))
        training.end(Status.PRUNED)
    tracker = WandbTracker(name="wandb", mode="online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    process = mirror.start(sweep.path, tracker, live=True)
    wait_until(sweep.run("run-a").mirror.exists)
    said = process.finish(0.5)
    assert said is not None
    assert "lacks 2 of 2 runs (run-a, run-b): the mirror did not end within 0.5 s" in said
    silent_server.accept()[0].close()

    monkeypatch.delenv("WANDB_API_KEY")
    training.folder.parquet("steps").write_bytes(b"not what was sealed")
    said = mirror.start(sweep.path, tracker, live=False).finish(TIMEOUT_S)
    assert said is not None
    assert "lacks 1 of 2 runs (run-b)" in said
    assert "because no API key is known" in said
    (segment,) = check_history(sweep.run("run-a"))
    assert segment.of("exit")[-1]["exit_code"] == 0


def test_online_run_is_gone_on_with_where_the_server_stands(
    sweep: SweepFolder, server: FakeServer
) -> None:
    training = FakeTraining(sweep, "run-a")
    training.begin()
    training.train(range(1, 6))
    tracker = WandbTracker(name="wandb", tags=["paper"])
    assert mirror.start(sweep.path, tracker, live=True).finish(TIMEOUT_S) is None
    state = MirrorState.read(training.folder)
    assert state is not None
    assert state.closed
    assert len(server.history) == 7
    # As if the mirror had been killed before it could note that.
    state.closed, state.last_step = False, -1
    state.write(training.folder)
    training.train(range(6, 13))
    training.end(Status.COMPLETED)
    assert mirror.start(sweep.path, tracker, live=True).finish(TIMEOUT_S) is None
    assert server.visible_history == expected_history(training.folder)
    assert server.run["tags"] == ["paper", "completed"]
    assert server.run["exitcode"] == 0
    assert server.summary["final_loss"] == training.status.summary["final_loss"]


@pytest.mark.slow
def test_offline_segments_are_uploaded_once(sweep: SweepFolder, server: FakeServer) -> None:
    training = FakeTraining(sweep, "run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.FAILED, "rank 0 died")
    assert mirror.start(sweep.path, OFFLINE, live=False).finish(TIMEOUT_S) is None
    training.begin(after=4)
    training.train(range(5, 13))
    training.end(Status.COMPLETED)
    # Online now, but the later rows must not arrive before the earlier ones.
    online = WandbTracker(name="wandb", mode="online")
    said = mirror.start(sweep.path, online, live=False).finish(TIMEOUT_S)
    assert said is not None
    assert "its first part was written offline and is not uploaded yet" in said
    assert server.history == []
    written = sorted(mirror.wandb_folder(sweep.path).glob("offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", *map(str, written)]
    subprocess.run(command, capture_output=True, check=True)
    assert server.visible_history == expected_history(training.folder)
    assert mirror.start(sweep.path, online, live=False).finish(TIMEOUT_S) is None
