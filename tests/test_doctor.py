"""The doctor, against a machine that is made to lack things."""

from __future__ import annotations

import json
import time
from importlib import metadata
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from batchscape import doctor
from batchscape.cli import main
from batchscape.doctor import Finding, ask
from batchscape.plan.machine import Machine

OK = Finding("Python", "ok", "3.11", needed=True)


@pytest.mark.slow
def test_the_whole_examination_of_this_machine(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    printed = capsys.readouterr().out
    answer = json.loads(printed)
    assert answer["fit"] is True
    lines = {line["what"]: line for line in answer["findings"]}
    assert lines["torch"]["detail"].startswith(metadata.version("torch"))
    assert lines["gloo"]["status"] == "ok"
    assert lines["memory"]["detail"].startswith(f"{psutil.virtual_memory().total / 2**30:.1f} GiB")
    for line in answer["findings"]:
        assert line["status"] in {"ok", "missing", "broken"}
        assert "Traceback" not in line["detail"]
        assert line["repair"] or line["status"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_needed_and_lacking_makes_it_unfit(monkeypatch, capsys) -> None:
    optional = Finding("shared memory", "broken", "little", "docker run --shm-size=8g")
    obstacle = Finding("gloo", "broken", "[no] route", "mend", needed=True)
    for findings, code in (([OK, optional], 0), ([OK, optional, obstacle], 1)):
        monkeypatch.setattr(doctor, "examine", lambda _, f=findings: f)
        assert main(["doctor"]) == code
        table = capsys.readouterr().out
        assert "docker run --shm-size=8g" in table
        assert ("cannot run here because of: gloo" in table) == bool(code)
        assert ("[no] route" in table) == bool(code)
        assert main(["doctor", "--json"]) == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["fit"] is (code == 0)
        assert [line["what"] for line in answer["findings"]] == [one.what for one in findings]


def test_a_probe_that_fails_is_a_line_and_the_order_stays(monkeypatch, tmp_path) -> None:
    def broken() -> list[Finding]:
        msg = "no\nsuch thing"
        raise RuntimeError(msg)

    def slow() -> list[Finding]:
        time.sleep(0.2)
        return [OK]

    monkeypatch.setattr(doctor, "torch_and_devices", lambda *_: [])
    monkeypatch.setattr(doctor, "processor", lambda _: slow())
    monkeypatch.setattr(doctor, "gloo", broken)
    findings = doctor.examine(tmp_path)
    assert findings[0] == OK
    assert Finding("gloo", "broken", "RuntimeError: no") in findings


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
    with pytest.raises(RuntimeError) as caught:
        ask("torch")
    assert str(caught.value) == message
    (finding,) = doctor.torch_and_devices(Machine.detect())
    assert finding.status == "broken"
    assert str(finding.repair).startswith("install torch for this driver")
    assert finding.is_obstacle


@pytest.mark.slow
def test_a_child_that_hangs_is_killed(tmp_path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_ANSWER_S", 10)
    with pytest.raises(RuntimeError, match="no answer within 10 s"):
        ask("torch")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_gloo_that_cannot_meet_is_an_obstacle(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    (finding,) = doctor.gloo()
    assert finding.status == "broken"
    assert finding.is_obstacle
    assert "nothere0" in finding.detail


def torch_answer(**changes) -> dict[str, object]:
    cpu = {"version": "2.13.0", "cuda_build": None, "devices": [], "problem": None}
    return cpu | changes


@pytest.mark.parametrize(
    ("answer", "in_driver", "obstacles"),
    [
        (torch_answer(), 0, set()),
        (torch_answer(), 1, {"CUDA"}),
        (torch_answer(cuda_build="13.0", problem="driver too old"), 2, {"CUDA"}),
        (torch_answer(cuda_build="13.0", devices=["H200, 140 GiB"] * 2), 2, set()),
    ],
)
def test_what_follows_from_the_build_of_torch(answer, in_driver, obstacles, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "ask", lambda _: answer)
    machine = Machine(2, "cpu", tuple(range(in_driver)))
    findings = {finding.what: finding for finding in doctor.torch_and_devices(machine)}
    assert {what for what, finding in findings.items() if finding.is_obstacle} == obstacles
    assert "CUDA 0" in findings or not answer["devices"]
    if "CUDA" in findings:
        assert (answer["problem"] or "knows no CUDA") in findings["CUDA"].detail


def test_shared_memory_that_is_small_is_told_with_what_enlarges_it(tmp_path, monkeypatch) -> None:
    """As Docker gives it; the default sweep does without."""
    monkeypatch.setattr(doctor, "_SHARED", tmp_path)
    usage = {"total": 64 * 2**20, "used": 16 * 2**20, "free": 48 * 2**20}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(**usage))
    (small,) = doctor.shared_memory()
    assert (small.status, small.is_obstacle) == ("broken", False)
    assert "0.06 GiB, 0.05 free" in small.detail
    assert "--shm-size" in str(small.repair)
    assert "loader.workers" in str(small.repair)
    usage |= {"total": 4 * 2**30, "free": 3 * 2**30}
    (enough,) = doctor.shared_memory()
    assert (enough.status, enough.detail) == ("ok", f"4.00 GiB, 3.00 free, {tmp_path}")
    monkeypatch.setattr(doctor, "_SHARED", tmp_path / "nowhere")
    assert [*doctor.shared_memory()] == []


def test_disks_that_are_full_or_cannot_be_written_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outputs, cache = doctor.disk(tmp_path / "not" / "yet" / "there")
    assert (outputs.status, cache.status) == ("ok", "ok")
    assert str(tmp_path) in cache.detail
    (tmp_path / "file").write_text("")
    blocked, _ = doctor.disk(tmp_path / "file" / "outputs")
    assert blocked.is_obstacle
    assert "cannot be written to" in blocked.detail
    monkeypatch.setattr(doctor, "_LEAST_DISK_GIB", 1e9)
    full, _ = doctor.disk(tmp_path)
    assert full.is_obstacle
    assert "GiB free" in full.detail


@pytest.mark.parametrize("error", ["NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED"])
def test_devices_whose_driver_tells_nothing_are_an_obstacle_as_they_are_to_a_sweep(
    tmp_path, monkeypatch, error
) -> None:
    """In a container that has the device and not the library, or the wrong one."""

    def start() -> None:
        raise pynvml.NVMLError(getattr(pynvml, error))

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr("batchscape.cuda_devices._DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "runs use CPU cores" in next(doctor.driver(Machine.detect())).detail
    (tmp_path / "nvidia3").touch()  # a container's only device need not be the first
    (finding,) = doctor.driver(Machine.detect())
    assert finding.is_obstacle
    assert "nvidia3" in finding.detail
    assert "nvidia-smi" in str(finding.repair)


def test_a_slice_of_a_device_is_an_obstacle(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    (finding,) = doctor.driver(Machine.detect())
    assert finding.is_obstacle
    assert "launcher.device=cpu" in str(finding.repair)


@pytest.mark.gpu
def test_cuda_devices_are_found_as_torch_sees_them() -> None:
    import torch

    machine = Machine.detect()
    findings = {finding.what: finding for finding in doctor.torch_and_devices(machine)}
    for index in range(torch.cuda.device_count()):
        line = findings[f"CUDA {index}"]
        assert line.status == "ok"
        assert torch.cuda.get_device_name(index) in line.detail
    assert next(doctor.driver(machine)).status == "ok"
