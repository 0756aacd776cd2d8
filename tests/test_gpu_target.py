"""`make gpu`: what it does where there is no CUDA device, and where its figures go."""

import ast
import json
import math
import os
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def of_benchmarks(monkeypatch):
    """Import as the scripts of benchmarks/gpu do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))


def listed(folder):
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def run(*command, **environment):
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def make(*arguments, **environment):
    return run("make", "--no-print-directory", *arguments, **environment)


@pytest.mark.slow
@without_device
def test_without_a_device_tests_are_collected_and_nothing_is_measured():
    before = listed(ROOT / "benchmarks")
    parts = "runs peers_eager"
    done = make("gpu", f"GPU_PYTHON={sys.executable}", f"GPU_PARTS={parts}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nruns: no CUDA device here; the tests were collected and skipped\n" in done.stdout
    assert "peers: no CUDA device here; nothing was measured\n" in done.stdout
    assert all(f"{part}: nothing to do\n" in done.stdout for part in parts.split())
    assert listed(ROOT / "benchmarks") == before


@pytest.mark.usefixtures("of_benchmarks")
def test_what_is_done_is_left_out_and_the_limit_ends_a_part_with_all_it_started(
    tmp_path, monkeypatch, capfd
):
    import measure

    (tmp_path / "results.py").write_text(
        "def states(parts):\n"
        "    return {**dict.fromkeys(parts, 'new'), 'old': 'done', 'slow': 'begun'}\n"
        "def note_end(*ended):\n    print('noted', *ended, flush=True)\n"
    )
    (tmp_path / "part.py").write_text("import sys; print('measured', *sys.argv[1:], flush=True)\n")
    (tmp_path / "bad.py").write_text("import sys; sys.exit(3)\n")
    # What it has started ends in order, a moment after it was told to.
    child = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), "
    child += "print('child ended', flush=True), exit())); time.sleep(600)"
    (tmp_path / "slow.py").write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print(child.pid, flush=True)\nchild.wait()\n"
    )
    parts = {"slow": ("slow.py",), "old": ("part.py",), "new": ("part.py", "this")}
    monkeypatch.setattr(measure, "HERE", tmp_path)
    monkeypatch.setattr(measure, "PARTS", {**parts, "bad": ("bad.py",)})
    monkeypatch.setattr(sys, "argv", ["measure.py", "--limit-s", "10"])
    with pytest.raises(SystemExit, match="not done: bad, slow; the same command goes on"):
        measure.main()
    printed = capfd.readouterr().out.splitlines()
    pid = printed.pop(-4)
    assert not psutil.pid_exists(int(pid))
    # The part that was begun before comes last.
    assert printed == [
        *("old: done before, at this commit on this card", "measured this", "noted new 0"),
        *("new: done", "noted bad 3", "bad: failed with code 3"),
        *("child ended", "noted slow None", "slow: not done within the limit"),
    ]
    monkeypatch.setattr(sys, "argv", ["measure.py", "none"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "no part is called none; there are slow, old, new, bad" in capfd.readouterr().err


@pytest.mark.parametrize("has_packages", [True, False])
def test_the_path_is_added_to_and_carried_packages_stand_in_for_missing_ones(
    tmp_path, has_packages
):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit {0 if has_packages else 1}\necho "$PYTHONPATH: $@"\n'
    )
    python.chmod(0o755)
    done = make(
        "gpu", "GPU_PARTS=training", f"GPU_PYTHON={python}", PYTHONPATH="/given/one:/given/two"
    )
    carried = "" if has_packages else f":{ROOT}/.gpu-wheels"
    path = f"{ROOT}/src{carried}:/given/one:/given/two"
    assert done.stdout == f"{path}: benchmarks/gpu/measure.py --limit-s 560 training\n"


@pytest.mark.usefixtures("of_benchmarks")
def test_figures_are_written_by_device_and_the_page_has_their_tables(tmp_path, monkeypatch, capsys):
    import results

    provenance = {
        "device": "NVIDIA H100 80GB HBM3",
        **dict.fromkeys(("driver", "cudnn", "nccl")),
        "torch": "2.11.0",
        "date": "2026-11-23",
        "commit": "abc",
    }
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "where", lambda: provenance)
    monkeypatch.setenv("GPU_ARCHIVE", str(tmp_path))
    monkeypatch.setattr(results.torch.cuda, "is_available", lambda: True)
    assert results.states(["part"]) == {"part": "new"}
    results.save("part", [], so_far=True)
    assert results.states(["part"]) == {"part": "begun"}
    assert "Nothing has been run" in results.page()
    compared = {"comparison": "a / b", "value": 1.23456, "low": None, "high": None, "n": 1}
    results.save("part", [{"name": "a|b", "s": 0.000123456, "ok": True}], [compared])
    file = tmp_path / "nvidia-h100-80gb-hbm3" / "part.json"
    assert json.loads(file.read_text()) | provenance == json.loads(file.read_text())
    assert results.states(["part"]) == {"part": "begun"}
    results.note_end("part", "1")
    assert results.states(["part"]) == {"part": "begun"}
    results.note_end("part", "0")
    assert results.states(["part"]) == {"part": "done"}
    with tarfile.open(tmp_path / "gpu_results.tar") as archive:
        kept = archive.extractfile(f"{tmp_path.name}/{file.parent.name}/part.json")
        assert kept.read() == file.read_bytes()
    for other in ("abd", "abc-dirty", None):
        provenance["commit"] = other
        assert results.states(["part"]) == {"part": "new"}
    table = [
        "## part: NVIDIA H100 80GB HBM3",
        "",
        "driver unknown, torch 2.11.0, cudnn unknown, nccl unknown, date 2026-11-23, commit abc.",
        "",
        "| name | s | ok |",
        "| --- | --- | --- |",
        "| a\\|b | 0.0001235 | True |",
        "",
        "| comparison | value | low | high | n |",
        "| --- | --- | --- | --- | --- |",
        "| a / b | 1.235 |  |  | 1 |",
        "",
    ]
    assert capsys.readouterr().out.endswith("\n".join(table) + "\n")
    assert results.page() == results.HEADING + "\n" + "\n".join(table)


@pytest.mark.usefixtures("of_benchmarks")
def test_a_measurement_that_fails_dies_or_hangs_is_a_reason():
    from apart import apart

    assert apart(dict, [("step_s", 0.5)], limit_s=60) == {"step_s": 0.5}
    assert apart(math.sqrt, -1, limit_s=60)["reason"].startswith("ValueError: ")
    assert apart(os._exit, 3, limit_s=60) == {"reason": "its process ended with code 3"}
    assert apart(time.sleep, 600, limit_s=1) == {"reason": "not done after 1 s"}


@pytest.mark.usefixtures("of_benchmarks")
def test_the_page_shows_all_results_that_there_are():
    import results

    assert results.PAGE.read_text() == results.page()


@pytest.mark.slow
@pytest.mark.usefixtures("of_benchmarks")
def test_the_study_has_figures_and_no_times_that_do_not_count(tmp_path):
    """On the CPU, and smaller; beside other tests its times may well be none."""
    import training

    small = [
        *("launcher.device=cpu", "model=gpt_micro", "model.d_model=32"),
        *("batch.global_batch_size=8", "batch.micro_batch_size=2,8", "data.sequence_length=32"),
        *("model.vocabulary_size=256", "budget.optimizer_steps=20", "evaluation.every_samples=80"),
        *("evaluation.samples=16", "evaluation.batch_size=8", "engine.compile=false"),
    ]
    rows, compared = training.study(tmp_path / "study", 200.0, small)
    cuts = [(r["micro_batch_size"], r["gradient_accumulation_steps"], r["seed"]) for r in rows]
    assert cuts == [(2, 4, 0), (2, 4, 1), (8, 1, 0), (8, 1, 1)]
    for row in rows:
        assert row["status"] == "completed"
        assert row["peak_allocated_gib"] > 0
        assert (row["step_time_s"] is None) == (row["timing_note"] is not None)
    (difference,) = compared
    assert difference["comparison"] == "held-out loss, micro-batch 2 less 8, eager"
    losses = [row["final_eval_loss"] for row in rows]
    expected = (losses[0] - losses[2] + losses[1] - losses[3]) / 2
    assert difference["value"] == pytest.approx(expected, abs=1e-12)
    # Half the distance of two values is their standard error; 6.314: of t with one degree, 5 %.
    half = 6.313752 * abs(losses[0] - losses[2] - losses[1] + losses[3]) / 2
    assert difference["high"] - difference["value"] == pytest.approx(half, rel=1e-5, abs=1e-12)
    assert difference["value"] - difference["low"] == pytest.approx(half, rel=1e-5, abs=1e-12)
    assert difference["n"] == 2


@pytest.mark.usefixtures("of_benchmarks")
def test_a_run_that_did_not_end_has_no_figures_and_seeds_are_compared_in_pairs():
    from sweep import row_of
    from training import eager_over_compiled

    run = {
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "engine.compile": False,
        "step_time_s": 0.1,
        "final_eval_loss": 10.65,
        "reason": None,
        "timing_note": "shared",
    }
    names = ("step_time_s", "final_eval_loss")
    ended = row_of({**run, "seed": 0, "status": "completed"}, names)
    cut = row_of({**run, "seed": 1, "status": "interrupted"}, names)
    assert [ended[name] for name in names] == [0.1, 10.65]
    assert [cut[name] for name in names] == [None, None]
    assert cut["timing_note"] == "shared"

    def compiled(seed, step_time_s):
        return {**ended, "seed": seed, "compile": True, "step_time_s": step_time_s}

    assert eager_over_compiled([ended, cut, compiled(1, 0.02)]) == []
    (compared,) = eager_over_compiled([ended, cut, compiled(0, 0.05), compiled(1, 0.02)])
    assert compared["comparison"] == "eager / compiled, micro-batch 4"
    assert compared["value"] == pytest.approx(2.0)
    assert compared["n"] == 1
    assert eager_over_compiled([]) == []


@pytest.mark.slow
@without_device
def test_a_test_that_cannot_be_imported_is_a_failure(tmp_path):
    (tmp_path / "hypothesis.py").write_text("raise ImportError('not here')\n")
    done = make("gpu", f"GPU_PYTHON={sys.executable}", "GPU_PARTS=runs", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "\nruns: failed with code " in done.stdout


def test_versions_are_the_oldest_that_is_named_and_the_pinned_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    (bound,) = oldest.specifier
    assert bound.operator == ">="
    printed = make("--dry-run", "versions").stdout
    assert f"for venv in .venv-torch-{bound.version} .venv;" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("of_benchmarks")
def test_outcomes_of_tests_are_counted_by_file(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_cannot_begin(broken): pass\n"
    )
    code = (
        "import json, pytest, run_tests; seen = run_tests.Outcomes(); "
        "pytest.main(['-q', '-p', 'no:cacheprovider', 'test_some.py'], plugins=[seen]); "
        "print(); print(json.dumps(seen.rows()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/benchmarks/gpu:{ROOT}/src"},
        capture_output=True,
        text=True,
        check=True,
    )
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 2, 1)


@pytest.mark.slow
def test_layers_of_a_step_and_its_kernels_are_measured_on_a_cpu_too():
    few = ("--device", "cpu", "--eager")
    script = ROOT / "benchmarks" / "gpu" / "step_costs.py"
    done = run(sys.executable, script, *few, "--rounds", "1", "--steps", "3")
    rows, compared = (ast.literal_eval(line) for line in done.stdout.splitlines()[-2:])
    assert [row["layer"] for row in rows] == [
        *("bare loop", "engine", "loader", "clock and recorder", "without telemetry"),
    ]
    assert all(row["step_s"] > 0 for row in rows)
    assert [each["n"] for each in compared] == [2] * 4
    done = run(sys.executable, ROOT / "benchmarks" / "gpu" / "step_kernels.py", *few)
    kernels = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    shares = [kernel["share_pct"] for kernel in kernels]
    assert shares == sorted(shares, reverse=True)
    assert 90 < sum(shares) <= 100.001
    # Of each layer two products backward for one forward, and those of the vocabulary.
    assert {"aten::mm", "aten::addmm"} <= {kernel["kernel"] for kernel in kernels}


@pytest.mark.usefixtures("of_benchmarks")
def test_a_sweep_that_does_not_end_is_killed_and_has_no_runs(tmp_path, monkeypatch):
    import sweep

    deaf = tmp_path / "python"
    deaf.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sweep.sys, "executable", str(deaf))
    monkeypatch.setattr(sweep, "STOP_S", 0.5)
    assert sweep.runs_of(tmp_path / "swept", 0.5) == []


@pytest.mark.usefixtures("of_benchmarks")
def test_a_commit_is_dirty_where_code_differs_whatever_it_is_told(tmp_path, monkeypatch):
    import results

    def git(*arguments):
        identity = ("-c", "user.name=N", "-c", "user.email=n@example.com")
        command = ["git", "-C", tmp_path, *identity, *arguments]
        return subprocess.check_output(command, text=True).strip()

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("COMMIT", "told")
    assert results.commit() == "told"
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    revision = git("rev-parse", "HEAD")
    figures = tmp_path / "benchmarks" / "results" / "a-device" / "part.json"
    figures.parent.mkdir(parents=True)
    figures.touch()
    assert results.commit() == revision
    (tmp_path / "new.py").touch()
    assert results.commit() == f"{revision}-dirty"
