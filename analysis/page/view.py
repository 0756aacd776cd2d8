"""`batchscape view`: the page of a running sweep, made anew as runs end, for this machine alone."""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from rich.console import Console

from batchscape.analysis.report.write import write_report
from batchscape.errors import BatchscapeError, ConfigError
from batchscape.outgoing import outgoing
from batchscape.record.folder import SweepFolder
from batchscape.record.instants import now
from batchscape.record.overview import Overview, overview, overview_text
from batchscape.record.status import Status
from batchscape.terminal import OutgoingConsole

_ADDRESS = "127.0.0.1"
_HOSTS = (_ADDRESS, "localhost")
"""Hosts that a browser on this machine, or at the near end of a tunnel, asks for."""
_NICENESS = 15
"""A rank that shares its core with the page keeps 97 % of it: weights 1024 and 36, `sched(7)`."""
_LEAST_PAUSE_S = 2.0
_PAUSES = 9.0
"""Time without work for each second of it, so that the page takes a tenth of one core at most."""
_FOLLOWS = "runs have ended: their page follows"
_NOT_ENDED = [status for status in Status if not status.has_end]
_FILES = resources.files("batchscape.analysis.page")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".json": "application/json",
}


@dataclass(frozen=True)
class _Snapshot:
    """State of the sweeps and their page; replaced as a whole."""

    page: int
    """Time of the page in milliseconds since the epoch; 0 while there is none."""
    state: str
    """States and counts, in a line."""
    overview: str
    """Output of `batchscape status`."""
    note: str = ""
    """Runs or faults that the page does not show yet."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The page and its tables, by path."""


class _PageServer(ThreadingHTTPServer):
    snapshot: _Snapshot

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  (socketserver's)
        """Ignore a browser that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers from memory: no path of a request is ever opened as a file."""

    server: _PageServer
    timeout = 30

    def do_GET(self) -> None:
        # Else a page of others, whose name they let point here, could read ours (DNS rebinding).
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, f"Ask for {_ADDRESS} or localhost")
            return
        path = self.path.partition("?")[0]
        snapshot = self.server.snapshot
        if path == "/state.json":
            state = asdict(replace(snapshot, files={}))
            del state["files"]
            content = json.dumps(state).encode()
        elif path in _OURS:
            content = _FILES.joinpath(_OURS[path]).read_bytes()
        elif path in snapshot.files:
            content = snapshot.files[path]
        else:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind = Path(path).suffix or ".html"
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": _KINDS[kind],
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            # The page has a policy of its own.
            "Content-Security-Policy": "frame-ancestors 'self'" if path == _PAGE else _POLICY,
        }
        if kind == ".csv":
            headers["Content-Disposition"] = "attachment"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401  (http.server's)
        """Leave the terminal alone."""


_OURS = {"/": "view.html", "/view.js": "view.js"}
_PAGE = "/report.html"


def view(sweep_dirs: Sequence[Path], port: int, console: Console) -> None:
    """Serve the page of sweeps until an interrupt; port 0 is any free one, no folder is written."""
    sweeps = [SweepFolder(sweep_dir) for sweep_dir in sweep_dirs]
    overviews = [overview(sweep) for sweep in sweeps]
    try:
        server = _PageServer((_ADDRESS, port), _Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port {port} of {_ADDRESS} cannot be had ({error}); leave out --port, and a free one "
            "is taken"
        ) from None
    with server:
        server.snapshot = _Snapshot(0, _state(overviews), _status_text(overviews))
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            console.print(f"Page: http://{_ADDRESS}:{server.server_port}/", soft_wrap=True)
            console.print("It follows the runs as they end. Ctrl-C ends it.")
            os.nice(_NICENESS)
            _follow(sweeps, server)
        except KeyboardInterrupt:
            console.print("Stopped")
        finally:
            server.shutdown()


def _follow(sweeps: Sequence[SweepFolder], server: _PageServer) -> None:
    runs_on_page: set[tuple[str, ...]] = set()
    next_page_s, problem = 0.0, ""
    while True:
        # Its own time: on a machine that is in use the clock would tell of others.
        began_s = time.process_time()
        try:
            overviews = [overview(sweep) for sweep in sweeps]
        except (BatchscapeError, OSError) as error:
            server.snapshot = replace(server.snapshot, note=outgoing(str(error)))
            time.sleep(_LEAST_PAUSE_S)
            continue
        ended = _ended_runs(overviews)
        note = (problem or _FOLLOWS) if ended != runs_on_page else ""
        state, status_text = _state(overviews), _status_text(overviews)
        server.snapshot = replace(server.snapshot, state=state, overview=status_text, note=note)
        pause_s = _PAUSES * (time.process_time() - began_s)
        if ended != runs_on_page and time.monotonic() >= next_page_s:
            began_s = time.process_time()
            try:
                files = _page_files(sweeps)
            except (BatchscapeError, OSError) as error:
                problem = outgoing(str(error))
                server.snapshot = replace(server.snapshot, note=problem)
            else:
                runs_on_page, problem = ended, ""
                gc.collect()  # a command does so only at a million objects
                page = round(now() * 1000)
                server.snapshot = replace(server.snapshot, page=page, note="", files=files)
            next_page_s = time.monotonic() + _PAUSES * (time.process_time() - began_s)
        time.sleep(max(_LEAST_PAUSE_S, pause_s))


def _ended_runs(overviews: Sequence[Overview]) -> set[tuple[str, ...]]:
    """Name the runs that have ended; none while all of them were rejected before the launch."""
    ended: set[tuple[str, ...]] = {
        (str(sweep.sweep_dir), run.run_id, run.status, str(run.attempts))
        for sweep in overviews
        for run in sweep.runs
        if run.status not in _NOT_ENDED
    }
    is_over = all(sweep.state != "running" for sweep in overviews)
    none_launched = all(status == Status.REJECTED for _, _, status, _ in ended)
    return set() if none_launched and not is_over else ended


def _page_files(sweeps: Sequence[SweepFolder]) -> dict[str, bytes]:
    """Make the page of a report, with the tables that it links to."""
    with TemporaryDirectory(prefix="batchscape-view-") as folder:
        out = Path(folder).resolve()
        report = write_report([sweep.path for sweep in sweeps], out, with_charts=False)
        return {
            f"/{file.relative_to(out).as_posix()}": file.read_bytes()
            for file in report.files
            if file.suffix == ".csv" or file.name == _PAGE[1:]
        }


def _state(overviews: Sequence[Overview]) -> str:
    several = len(overviews) > 1
    return "; ".join(
        (f"{sweep.sweep_dir.name} " if several else "")
        + f"{sweep.state}: "
        + ", ".join(f"{count} {status}" for status, count in sweep.counts.items())
        for sweep in overviews
    )


def _status_text(overviews: Sequence[Overview]) -> str:
    text = io.StringIO()
    # The browser breaks the lines, since it knows its width.
    console = OutgoingConsole(file=text, width=1000, color_system=None, markup=False)
    for sweep in overviews:
        console.print(overview_text(sweep))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
