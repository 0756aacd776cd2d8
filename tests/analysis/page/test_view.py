"""`batchscape view`, by real processes and in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from batchscape.analysis.page import view as view_module
from batchscape.cli import main
from batchscape.errors import AnalysisError
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import take

SOON_S = 120
END_OF_A_LINE = """(figure) => {
    const [left, top] = figure.view.origin();
    const { charts } = JSON.parse(document.getElementById("content").textContent);
    const tables = Object.keys(charts.loss.tables).flatMap((name) => {
        try { return [figure.view.data(name)]; } catch { return []; } });
    const row = tables.find((rows) => rows.length && "eval_loss" in rows[0]).at(-1);
    const [x, y] = [figure.view.scale("x")(row.samples), figure.view.scale("y")(row.eval_loss)];
    return { x: left + x, y: top + y }; }"""
"""Where it lies on the canvas."""
GEOMETRIES = ((1, 32, 1), (1, 8, 4), (2, 8, 2))


@contextmanager
def viewed(*folders: Path, ends: signal.Signals = signal.SIGINT) -> Iterator[str]:
    """Start the command, and yield the address that it prints; it ends in order.

    It makes pages as fast as it can; for a user it pauses for many times what a page takes, and
    gives way to everything else, which on a busy machine lasts for ever.
    """
    code = "from batchscape.analysis.page import view; from batchscape.cli import main; "
    code += (
        "import sys; view._PAUSES, view._NICENESS = 1, 0; sys.exit(main(['view', *sys.argv[1:]]))"
    )
    program = [sys.executable, "-c", code, *map(str, folders)]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            match = re.fullmatch(r"Page: (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
            if match is not None:
                yield match[1]
            process.send_signal(ends)
            output, wrong = process.communicate(timeout=60)
        finally:
            process.kill()
    assert match, wrong
    assert (process.returncode, wrong) == (0, "")
    assert output.endswith("Stopped\n")


def asked(address: str, path: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    """Ask for a path as it stands, which a client that tidies paths would not."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
    connection.request("GET", path, headers={"Host": host or place.netloc})
    answer = connection.getresponse()
    response = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return response


def state(address: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(asked(address, "/state.json")[2])
    return content


def soon(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + SOON_S
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return value


def files_in(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.slow
def test_serves_what_it_made_to_this_machine_alone(build):
    sweep = build()
    for geometry in GEOMETRIES:
        sweep.run(geometry)
    (sweep.path / "secret.csv").write_text("a,b\n")
    before = files_in(sweep.path)
    with viewed(sweep.path, ends=signal.SIGTERM) as address:
        soon(lambda: state(address)["page"])
        status, headers, page = asked(address, "/report.html")
        assert (status, headers["Content-Security-Policy"]) == (200, "frame-ancestors 'self'")
        links = set(re.findall(r'href="(tables/[^"]*)"', page.decode()))
        assert len(links) > 2
        for link in links:
            status, headers, table = asked(address, f"/{link}")
            assert (status, headers["Content-Disposition"]) == (200, "attachment"), link
            assert table
        port = urlsplit(address).port
        for host in (f"localhost:{port}", "localhost:8888", "127.0.0.1"):
            assert asked(address, "/", host)[0] == 200, "a tunnel may end at another port"
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1]", ""):
            for path in ("/", "/state.json", "/report.html"):
                assert asked(address, path, host or " ")[0] == 403, host
        for path in (
            "/tables",
            "/tables/",
            "/secret.csv",
            "/report.md",
            "/page.py",
            "//etc/passwd",
            "/../secret.csv",
            "/tables/../../secret.csv",
            "/%2e%2e/secret.csv",
            f"/{sweep.path}/secret.csv",
            f"{sweep.path}/plan.csv",
        ):
            assert asked(address, path)[0] == 404, path
    assert files_in(sweep.path) == before


def test_what_cannot_be_viewed_is_a_message(build, tmp_path, capsys):
    assert main(["view", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    sweep = build()
    sweep.run((1, 32, 1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["view", str(sweep.path), "--port", port]) == 2
    assert f"port {port} of 127.0.0.1 cannot be had" in capsys.readouterr().err
    assert main(["view", str(sweep.path), "--port", "70000"]) == 2
    assert "port 70000 of 127.0.0.1 cannot be had" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_follows_the_runs(build, browser):
    """What a reader has chosen stays; who looks at the runs behind a number is left in peace."""
    sweep = build()
    reason = "global_batch_size must be a multiple of 2 x 32 (32 is not)"
    sweep.reject((2, 32, None), 32, reason)
    sweep.run((1, 32, 1), status="pending")
    lock = take(SweepFolder(sweep.path).lock)
    assert lock is not None
    with viewed(sweep.path) as address:
        page = browser(address)
        page.wait_for_selector("text=No run has ended yet")
        assert reason in page.text_content("#progress pre")
        assert page.text_content("#progress summary") == (
            "running: 1 pending, 1 rejected · no page yet"
        )
        assert page.locator("iframe").count() == 0
        for geometry in GEOMETRIES[1:]:
            sweep.run(geometry)
        page.wait_for_selector("iframe", timeout=SOON_S * 1000)
        assert page.locator("#progress").get_attribute("open") is None, "the page has the room"
        runs = "header .title .muted"
        frame, newest = map(page.frame_locator, ("iframe", "iframe >> nth=-1"))
        # A page of the first run alone may come before, and stays until the next has loaded.
        newest.locator(f"{runs} >> text=2 completed").wait_for()
        soon(lambda: page.locator("iframe").count() == 1)
        soon(lambda: "2 completed" in page.text_content("#progress summary"))
        assert page.title().endswith("report of batchscape")
        frame.locator("#loss > summary").click()
        frame.locator("#loss select[data-choice=x]").select_option("samples")
        frame.locator("#theme").click()
        frame.locator("#comparison > summary").click()
        frame.locator("#comparison > summary").click()
        # A point is clicked: its runs are shown until the reader has seen them.
        frame.locator("figure#loss[data-drawn=yes]").wait_for()
        frame.locator("figure#loss canvas").click(
            position=page.frames[1].eval_on_selector("figure#loss", END_OF_A_LINE)
        )
        frame.locator("dialog#runs[open]").wait_for()
        source = page.locator("iframe").get_attribute("src")
        sweep.run((4, 8, 1), status="oom", reason="CUDA out of memory", stop_reason=None)
        soon(lambda: "1 oom" in page.text_content("#progress summary"))
        soon(lambda: f"report.html?{state(address)['page']}" != source)
        assert page.locator("iframe").get_attribute("src") == source
        frame.locator("dialog button").click()
        newest.locator(f"{runs} >> text=1 oom").wait_for(timeout=SOON_S * 1000)
        soon(lambda: page.locator("iframe").count() == 1)
        assert "CUDA out of memory" in frame.locator("#notes").text_content()
        assert frame.locator("details#loss").get_attribute("open") is not None
        assert frame.locator("details#comparison").get_attribute("open") is None
        assert frame.locator("#loss select[data-choice=x]").input_value() == "samples"
        assert frame.locator("html").get_attribute("data-theme") == "dark"
        colour = "document.querySelector('figure#loss').view?.background()"
        soon(lambda: page.frames[1].evaluate(colour) == "#16181c")
        assert browser.wrong == []
    page.wait_for_selector("text=batchscape view has ended")
    browser.wrong.clear()  # that nobody answers any more
    page.close()
    lock.release()


def test_a_page_that_cannot_be_made_says_so_until_it_can(build, monkeypatch):
    sweep = build()
    sweep.run()
    server = SimpleNamespace(snapshot=view_module._Snapshot(0, "", ""))
    notes: list[str] = []

    def rendered(_: object) -> dict[str, bytes]:
        msg = "no page of this"
        raise AnalysisError(msg)

    def sleep(_: float) -> None:
        notes.append(server.snapshot.note)
        if len(notes) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(view_module, "_page_files", rendered)
    monkeypatch.setattr(view_module.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        view_module._follow([SweepFolder(sweep.path)], server)
    assert notes == ["no page of this"] * 3
