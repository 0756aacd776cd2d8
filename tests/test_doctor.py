"""The doctor, against a machine that is made to lack things."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from rich.console import Console

from batchscape.cli import main
from batchscape.doctor import machine, tools, torch_probes
from batchscape.doctor.child import QUESTIONS
from batchscape.doctor.children import ChildError, ask
from batchscape.doctor.examine import Examination, examine_with
from batchscape.doctor.finding import Finding, findings_of

OK = Finding("Python", "ok", "3.11", needed=True)


def executable(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def only(tmp_path, monkeypatch) -> Path:
    """A folder that is the whole search path for programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.slow
def test_the_whole_examination_of_this_machine(tmp_path, monkeypatch, capsys) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    key = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "--compile"]) == 0
    printed = capsys.readouterr().out
    told = json.loads(printed)
    assert told["fit"] is True
    assert key not in printed
    found = {line["what"]: line for line in told["findings"]}
    assert found["torch"]["detail"].startswith(metadata.version("torch"))
    assert found["gloo"]["status"] == "ok"
    assert found["fork server"]["status"] == "ok"
    assert found["torch.compile"]["status"] in {"ok", "missing"}
    assert "tracker.mode=auto is online" in found["W&B"]["detail"]
    assert "W&B key" not in found
    assert found["memory"]["detail"].startswith(f"{psutil.virtual_memory().total / 2**30:.1f} GiB")
    for line in told["findings"]:
        assert line["status"] in {"ok", "missing", "broken", "not needed"}
        assert "Traceback" not in line["detail"]
        assert line["repair"] or line["status"] in {"ok", "not needed"}
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_needed_and_lacking_makes_it_unfit(monkeypatch, capsys) -> None:
    optional = Finding("LaTeX", "missing", "no pdflatex", "apt-get install it")
    fit = Examination((OK, optional))
    unfit = Examination(
        (OK, optional, Finding("gloo", "broken", "[no] route", "mend", needed=True))
    )
    assert fit.is_fit
    assert not unfit.is_fit
    for examination, code in ((fit, 0), (unfit, 1)):
        monkeypatch.setattr("batchscape.doctor.examine.examine", lambda *_, e=examination, **__: e)
        assert main(["doctor"]) == code
        table = capsys.readouterr().out
        assert "apt-get install it" in table
        assert ("cannot run here because of: gloo" in table) == bool(code)
        assert ("[no] route" in table) == bool(code)
        assert main(["doctor", "--json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert told["fit"] is (code == 0)
        assert [line["what"] for line in told["findings"]] == [
            finding.what for finding in examination.findings
        ]


def test_a_probe_that_fails_is_a_line_and_the_order_stays() -> None:
    def broken() -> list[Finding]:
        msg = "no\nsuch thing"
        raise RuntimeError(msg)

    def slow() -> list[Finding]:
        time.sleep(0.2)
        return [OK]

    found = examine_with([("slow", slow), ("late", broken), ("quick", lambda: [OK])]).findings
    assert found == (OK, Finding("late", "broken", "RuntimeError: no"), OK)
    assert findings_of("x", lambda: [OK]) == [OK]


def test_a_terminal_sees_what_is_still_probed() -> None:
    """And is left as it was; a file sees nothing."""
    quick_is_shown = threading.Event()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if "1/2" in text and "the slow one" in text and "the quick one" not in text:
                quick_is_shown.set()
            return super().write(text)

    def slow() -> list[Finding]:
        return [OK] if quick_is_shown.wait(30) else []

    probes = [("the slow one", slow), ("the quick one", lambda: [OK])]
    console = Console(file=Watched(), force_terminal=True, width=100)
    assert examine_with(probes, console).findings == (OK, OK)
    plain = io.StringIO()
    assert len(examine_with(probes, Console(file=plain)).findings) == 2
    assert plain.getvalue() == ""


def test_compilation_is_probed_only_where_it_is_asked_for(tmp_path, monkeypatch, capsys) -> None:
    asked = []
    for name in ("torch", "gloo", "fork_server", "compilation"):
        monkeypatch.setattr(torch_probes, name, lambda name=name: asked.append(name) or [OK])
    monkeypatch.setattr(tools, "tracker", lambda: [OK])
    for option in ([], ["--compile"]):
        assert main(["doctor", "--dir", str(tmp_path), *option]) == 0
        table = capsys.readouterr().out
        assert ("not probed" in table) == ("batchscape doctor --compile" in table) == (not option)
        assert ("compilation" in asked) == bool(option)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "killed by SIGABRT"),
        ("raise SystemExit(7)", "exit code 7"),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ('print(\'{"error": "too old"}\')', "too old"),
    ],
)
def test_a_child_that_fails_says_why(code, message, tmp_path, monkeypatch) -> None:
    """A real process that imports a `torch` which behaves so."""
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "print" in code:
        (tmp_path / "torch.py").write_text(
            code + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"
        )
    with pytest.raises(ChildError) as told:
        ask("torch_build", 60)
    assert str(told.value) == message
    (found,) = torch_probes.torch()
    assert (found.status, found.repair) == ("broken", "pip install torch")
    assert found.is_obstacle


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, pathlib, time\n"
        "other = os.fork()\n"
        f"pathlib.Path({str(tmp_path)!r}, f'pid-{{os.getpid()}}').touch()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ChildError, match="no answer within 2 s"):
        ask("torch_build", 2)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_gloo_that_cannot_meet_is_an_obstacle(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    (found,) = torch_probes.gloo()
    assert found.status == "broken"
    assert found.is_obstacle
    assert "nothere0" in found.detail


@pytest.mark.slow
def test_gloo_ends_with_its_first_rank_though_the_second_has_not_begun() -> None:
    """As on a busy machine: it would look for a store that is gone, for minutes."""
    late = """if True:
        import os, time
        fork = os.fork
        def forked():
            other = fork()
            if not other:
                time.sleep(3)
            return other
        os.fork = forked
        from batchscape.doctor.child import gloo
        gloo()
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nothere0"}
    # It ends once every process has let go of its streams.
    done = subprocess.run(
        [sys.executable, "-c", late], env=environment, capture_output=True, timeout=60, check=False
    )
    assert b"nothere0" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("only")
def test_compilation_without_a_compiler(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    (found,) = torch_probes.compilation()
    assert (found.status, found.detail) == ("missing", "no C++ compiler")
    assert "g++" in str(found.repair)
    assert not found.is_obstacle


def torch_answer(**changes) -> dict[str, object]:
    cpu = {
        "version": "2.13.0",
        "cuda_build": None,
        "hip_build": None,
        "threads": 2,
        "cpu_capability": "AVX2",
        "cpu_bf16": False,
        "cpu_fp16": False,
        "gloo": True,
        "nccl": None,
        "devices": [],
        "cuda_problem": None,
    }
    return cpu | changes


DEVICE = {"name": "H200", "memory_gib": 139.8, "capability": "9.0"}
NATIVE = {"bf16": True, "fp16": True, "tf32": True}


@pytest.mark.parametrize(
    ("answer", "in_driver", "expected"),
    [
        (
            torch_answer(),
            0,
            {"CUDA": "not needed", "NCCL": "not needed", "bf16": "not needed", "torch": "ok"},
        ),
        (torch_answer(cpu_bf16=True), 1, {"CUDA": "broken", "bf16": "ok"}),
        (
            torch_answer(cuda_build="13.0", cuda_problem="driver too old"),
            2,
            {"CUDA": "broken"},
        ),
        (
            torch_answer(
                cuda_build="13.0", devices=[DEVICE | NATIVE] * 2, nccl="2.27.3", flash=True
            ),
            2,
            {
                "CUDA 0": "ok",
                "CUDA 1": "ok",
                "NCCL": "ok",
                "bf16": "ok",
                "TF32": "ok",
                "flash attention": "ok",
            },
        ),
        (
            torch_answer(
                cuda_build="12.6",
                devices=[DEVICE | NATIVE, DEVICE | NATIVE | {"bf16": False, "tf32": False}],
                flash=False,
            ),
            2,
            {"NCCL": "missing", "bf16": "not needed", "fp16": "ok", "TF32": "not needed"},
        ),
    ],
)
def test_what_follows_from_the_build_of_torch(answer, in_driver, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch_probes, "ask", lambda *_: answer)
    seen = machine.Machine(2, "cpu", tuple(range(in_driver)))
    monkeypatch.setattr(torch_probes.Machine, "detect", lambda: seen)
    found = {finding.what: finding for finding in torch_probes.torch()}
    assert {what: found[what].status for what in expected} == expected
    unfit = any(finding.is_obstacle for finding in found.values())
    assert unfit == ("broken" in expected.values() or expected.get("NCCL") == "missing")
    if "CUDA" in found and found["CUDA"].status == "broken":
        assert (answer["cuda_problem"] or "knows no CUDA") in found["CUDA"].detail


@pytest.mark.parametrize("kpsewhich", [None, "exit 1", "exec /bin/sleep 60"])
def test_latex_without_what_finds_booktabs_is_missing(kpsewhich, only, monkeypatch) -> None:
    monkeypatch.setattr(tools, "_TOOL_S", 0.3)
    executable(only, "pdflatex", "exit 0")
    if kpsewhich is not None:
        executable(only, "kpsewhich", kpsewhich)
    (found,) = findings_of("LaTeX", tools.latex)
    assert (found.status, found.detail) == ("missing", "pdflatex without booktabs")
    assert "texlive" in str(found.repair)


def test_latex_absent_and_there(only) -> None:
    assert tools.latex()[0].status == "missing"
    executable(only, "pdflatex", "exit 0")
    executable(only, "kpsewhich", 'test "$1" = booktabs.sty && echo /texmf/booktabs.sty')
    assert tools.latex()[0].status == "ok"


def test_wandb_without_a_key_goes_offline(tmp_path, monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    library, key = tools.tracker()
    assert library.status == "ok"
    assert metadata.version("wandb") in library.detail
    assert "offline" in library.detail
    assert (key.status, key.repair, key.needed) == ("missing", "wandb login", False)


def test_transformers_is_named_with_its_command(monkeypatch) -> None:
    (there,) = tools.transformers()
    assert (there.status, there.detail) == ("ok", metadata.version("transformers"))

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    (missing,) = tools.transformers()
    assert (missing.status, missing.repair) == ("missing", "pip install 'batchscape[hf]'")


def test_packages_that_are_always_needed(monkeypatch) -> None:
    assert machine.packages()[0].status == "ok"
    wanted = ["torch>=2.6", "no-such-package<2", "absent-extra>=1; extra == 'hf'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda _: wanted)
    (found,) = machine.packages()
    assert (found.detail, found.repair) == ("no-such-package", "pip install no-such-package")
    assert found.is_obstacle


def test_disks_that_are_full_or_cannot_be_written_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outputs, cache = machine.disk(tmp_path / "not" / "yet" / "there")
    assert (outputs.status, cache.status) == ("ok", "ok")
    assert str(tmp_path / "cache") in cache.detail
    (tmp_path / "file").write_text("")
    blocked, _ = machine.disk(tmp_path / "file" / "outputs")
    assert blocked.is_obstacle
    assert "cannot be written to" in blocked.detail
    monkeypatch.setattr(machine, "_LEAST_DISK_GIB", 1e9)
    full, _ = machine.disk(tmp_path)
    assert full.is_obstacle
    assert "GiB free" in full.detail


def test_shared_memory_that_is_small_is_told_with_what_enlarges_it(tmp_path, monkeypatch) -> None:
    """As Docker gives it; the default sweep does without."""
    monkeypatch.setattr(machine, "_SHARED", tmp_path)
    usage = {"total": 64 * 2**20, "used": 16 * 2**20, "free": 48 * 2**20}
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(**usage))
    (small,) = machine.shared_memory()
    assert (small.status, small.is_obstacle) == ("broken", False)
    assert "0.06 GiB, 0.05 free" in small.detail
    assert "--shm-size" in str(small.repair)
    assert "loader.workers" in str(small.repair)
    usage |= {"total": 4 * 2**30, "free": 3 * 2**30}
    (enough,) = machine.shared_memory()
    assert (enough.status, enough.detail) == ("ok", f"4.00 GiB, 3.00 free, {tmp_path}")
    monkeypatch.setattr(machine, "_SHARED", tmp_path / "nowhere")
    assert machine.shared_memory()[0].status == "not needed"


@pytest.mark.parametrize("error", ["NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED"])
def test_devices_whose_driver_tells_nothing_are_an_obstacle_as_they_are_to_a_sweep(
    tmp_path, monkeypatch, error
) -> None:
    """In a container that has the device and not the library, or the wrong one."""

    def start() -> None:
        raise pynvml.NVMLError(getattr(pynvml, error))

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr("batchscape.plan.machine._DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.driver()[0].status == "not needed"
    (tmp_path / "nvidia3").touch()  # a container's only device need not be the first
    (found,) = machine.driver()
    assert found.is_obstacle
    assert "nvidia3" in found.detail
    assert "nvidia-smi" in str(found.repair)


def test_a_slice_of_a_device_is_an_obstacle(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    (found,) = machine.mig()
    assert found.is_obstacle
    assert "launcher.device=cpu" in str(found.repair)


def test_every_question_has_a_child_that_answers_it() -> None:
    assert set(QUESTIONS) == {"torch_build", "gloo", "compiled", "tracker"}
    command = [sys.executable, "-m", "batchscape.doctor.child", "no-such-question"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout.splitlines()[-1]) == {"error": "KeyError: 'no-such-question'"}


@pytest.mark.gpu
def test_cuda_devices_are_found_as_torch_sees_them() -> None:
    import torch

    found = {finding.what: finding for finding in torch_probes.torch()}
    for index in range(torch.cuda.device_count()):
        line = found[f"CUDA {index}"]
        assert line.status == "ok"
        assert torch.cuda.get_device_name(index) in line.detail
    assert found["NCCL"].status == "ok"
    assert machine.driver()[0].status == "ok"
    assert torch_probes.compilation()[0].detail.startswith("a tiny function on cuda")


def test_what_is_still_probed_leaves_as_all_texts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "ghp_" + "aB3d" * 9
    drawn = threading.Event()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if "1/2" in text:
                drawn.set()
            return super().write(text)

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")

    def late() -> list[Finding]:
        return [OK] if drawn.wait(30) else []

    examine_with([(f"with {token}", late), ("quick", lambda: [OK])])
    assert "with [a token of GitHub]" in shown.getvalue()
    assert token not in shown.getvalue()
