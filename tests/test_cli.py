from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import batchscape.conf
from batchscape import __version__
from batchscape.cli import main
from batchscape.compose import compose
from batchscape.config import Batch, Budget, Command, JsonlMetrics, Local, RunConfig
from batchscape.config.explain import meaning_of, values_of
from batchscape.config.settings import SETTINGS
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load, verify_seal
from batchscape.verbs import Parser, help_of

Captured = pytest.CaptureFixture[str]
QUICK = [
    "model=gpt_micro",
    "tracker=none",
    "launcher.device=cpu",
    "data.sequence_length=16",
    "budget.samples=64",
    "evaluation.every_samples=null",
    "evaluation.samples=16",
    "measure.memory=false",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, so that what a command leaves is seen."""
    monkeypatch.chdir(tmp_path)


def left_behind() -> set[str]:
    return {path.name for path in Path.cwd().iterdir()}


def error_of(capsys: Captured, argv: list[str], code: int) -> str:
    """Run a command that fails; return what it says, and check that it is a message only."""
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert left_behind() == set()
    return captured.err


HYDRA_VERBS = ("sweep", "run", "plan", "probe")
PARSER_VERBS = (
    *("status", "cancel", "report", "view", "analyze", "recommend", "sync", "doctor"),
    *("check-config", "configs", "geometry"),
)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_names_every_verb(argv: list[str], capsys: Captured) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for verb in (*HYDRA_VERBS, *PARSER_VERBS):
        assert f"batchscape {verb} " in text


@pytest.mark.parametrize("verb", [*HYDRA_VERBS, *PARSER_VERBS])
def test_help_of_a_verb_has_an_example(verb: str, capsys: Captured) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: batchscape {verb}" in text
    assert "Example" in text
    assert text.count(f"batchscape {verb} ") >= 2
    assert left_behind() == set()


@pytest.mark.parametrize("verb", PARSER_VERBS)
def test_what_a_help_shows_is_what_is_read(verb: str) -> None:
    text, _, before_a_run = help_of(verb).partition("Before a run:\n")
    assert Parser(verb).options == re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    if before_a_run:
        options = re.findall(r"^  (--[a-z-]+)", before_a_run, re.MULTILINE)
        assert Parser("recommend key=value").options == options


@pytest.mark.parametrize("verb", ["sweep", "run", "plan"])
def test_help_lists_every_group_of_settings(verb: str, capsys: Captured) -> None:
    assert main([verb, "--help"]) == 0
    listed = capsys.readouterr().out.partition("one of ")[2].partition("\n  --")[0]
    conf = Path(batchscape.conf.__file__).parent
    groups = {path.parent.name for path in conf.glob("*/*.yaml")}
    assert sorted(re.findall(r"\w+", listed)) == sorted(groups)


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"batchscape {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["swep"], "did you mean sweep?"),
        (["run", "sweeps=fixed_global_batch"], "use: batchscape sweep sweeps=fixed_global_batch"),
        (["sweeps=fixed_global_batch"], "use: batchscape sweep sweeps=fixed_global_batch"),
        (["run", "seed=0,1"], "use: batchscape sweep seed=0,1"),
        (["run", "--multirun", "seed=0"], "use: batchscape sweep seed=0"),
        (
            ["run", "--retry", "failed", "seed=0,1"],
            "use: batchscape sweep --retry failed seed=0,1",
        ),
        (["run", "seed=-1"], "seed"),
        (["run", "batch.micro_batch_size=5"], "1 x 4 x 8 = 32"),
        (["run", "data=text", "data.path=/nothing/there"], "/nothing/there"),
        (["report", "nowhere"], "nowhere"),
        (["status", "nowhere"], "nowhere does not exist; a sweep folder"),
        (["sync", "nowhere"], "nowhere does not exist; a sweep folder"),
        (["status", "nowhere", "--jsn"], "unrecognized arguments: --jsn; did you mean --json?"),
        (["recommend", "nowhere", "--dealine=2h"], "did you mean --deadline?"),
        (["recommend", "nowhere", "--dead", "2h"], "unrecognized arguments: --dead 2h"),
    ],
    ids=" ".join,
)
def test_bad_input_is_a_message_and_code_2(argv: list[str], message: str, capsys: Captured) -> None:
    assert message in error_of(capsys, argv, 2)


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("batchscape.plan.build.make_plan", broken)
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def test_plan_shows_and_leaves_nothing(capsys: Captured) -> None:
    assert main(["plan", "sweeps=musev_224"]) == 0
    text = capsys.readouterr().out
    assert "16 x 7 x 2 = 224" in text
    assert "outputs/musev_224" in text
    assert left_behind() == set()


def test_settings_are_shown_with_what_they_mean(capsys: Captured) -> None:
    read = ["engine.metrics.kind=jsonl", "+engine.metrics.columns={loss: nll}"]
    assert main(["run", "--cfg", "job", "engine=command", "engine.argv=[train]", *read]) == 0
    output = capsys.readouterr().out
    assert yaml.safe_load(output)["engine"]["metrics"] == {
        "kind": "jsonl",
        "columns": {"loss": "nll"},
    }
    text = " ".join(line.strip().removeprefix("# ") for line in output.splitlines())
    assert f"{meaning_of(JsonlMetrics, 'columns')} (mapping; time, record) columns:" in text
    for setting in SETTINGS:
        name = setting.path[-1]
        if setting.owner in {RunConfig, Batch, Budget, Command, Local} and name != "name":
            about = f"{values_of(setting.hint)}; {setting.affects}"
            assert f"{meaning_of(setting.owner, name)} ({about}) {name}:" in text


def test_sweep_then_status_then_report(capsys: Captured) -> None:
    axes = ["batch.data_parallel_size=1,2", "batch.micro_batch_size=16,32"]
    assert main(["sweep", *axes, *QUICK]) == 0
    (folder,) = Path("outputs").iterdir()
    assert folder.name.startswith("data_parallel_size-micro_batch_size-")
    assert f"batchscape report {folder}" in capsys.readouterr().out
    assert left_behind() == {"outputs"}
    table = pd.read_csv(SweepFolder(folder).plan)
    assert table["planned"].value_counts().to_dict() == {"launch": 3, "rejected": 1}

    assert main(["status", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.count("2/2") == 3
    assert "3 runs: 3 completed; 1 run rejected" in text
    assert "The same command now skips 3 done." in text
    assert main(["status", str(folder), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "finished"
    assert status["counts"] == {"completed": 3, "rejected": 1}
    assert status["next"] == {"skip": 3, "reject": 1}

    # Hydra's own way to say it finds the same folder, and has nothing to do.
    before = {run.path.name: read_json(run.status) for run in SweepFolder(folder).run_folders()}
    assert main(["--multirun", *axes, *QUICK]) == 0
    after = {run.path.name: read_json(run.status) for run in SweepFolder(folder).run_folders()}
    assert after == before
    assert [path.name for path in Path("outputs").iterdir()] == [folder.name]
    capsys.readouterr()

    assert main(["report", str(folder), "--out", "here"]) == 0
    assert "here" in capsys.readouterr().out
    assert (Path("here") / "tables" / "comparison.csv").exists()


@pytest.mark.slow
def test_a_cell_that_diverges_leaves_the_others_alone(capsys: Captured) -> None:
    """A rate of 1e30 makes every parameter so large that the second loss is not a number."""
    rates = "optimizer.learning_rate=0.01,1e30,0.1"
    argv = ["sweep", "optimizer=sgd", rates, *QUICK, "budget.samples=320", "sweep_dir=here"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    outcomes = {}
    for run in SweepFolder(Path("here")).run_folders():
        status = RunStatus.read(run.status)
        verify_seal(run, status)
        rate = read_json(run.config)["config"]["optimizer"]["learning_rate"]
        outcomes[rate] = (status.status, status.cause, status.rank, status.reason)
    reason = "the loss of optimizer step 2 is not finite"
    completed = (Status.COMPLETED, None, None, None)
    assert outcomes == {
        0.01: completed,
        1e30: (Status.DIVERGED, Cause.DIVERGENCE, 0, reason),
        0.1: completed,
    }
    # The first row that is not finite is kept, and the others have none.
    steps = load(Path("here")).steps
    lost = steps[~np.isfinite(steps["loss"].astype(float))]
    assert (lost["run_id"].nunique(), lost["optimizer_step"].min()) == (1, 2)
    assert f"diverged: {reason}" in printed
    assert "3 runs: 2 completed, 1 diverged" in printed
    assert main(argv) == 0
    assert "3 of 3 runs done already, not run again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "sweeps=mine seed=0,1 --config-dir DIR",
        "sweeps=mine -cd DIR seed=0,1",
        "--config-dir=DIR sweeps=mine seed=0,1",
    ],
)
def test_options_may_stand_anywhere(line: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    arguments = [word.replace("DIR", str(tmp_path)) for word in line.split()]
    assert main(["plan", *arguments]) == 0
    assert "Runs: 2. Rejected runs: 0." in capsys.readouterr().out


@pytest.mark.parametrize("path", ["/home/jürgen/a b", "🐳", "a(1)", "it's", r"a\"b", "ü\\"])
def test_a_path_that_cannot_be_read_is_shown_as_it_would_work(path: str, capsys: Captured) -> None:
    assert main(["run", f"sweep_dir={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sweep_dir={path}: the value cannot be read")
    (setting,) = shlex.split(error.rpartition("for the shell too: ")[2])
    grid = compose([setting], "batchscape run")
    assert grid is not None
    assert grid.fixed == {"sweep_dir": path}


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["optimiser=muon"], "did you mean optimizer?"),
        (["modle=mlp"], "did you mean model?"),
        (["sede=1"], "did you mean seed?"),
        (["model.d_modle=1"], "did you mean model.d_model?"),
        (["optimiser.learning_rat=1"], "did you mean optimizer.learning_rate?"),
        (
            ["model=custom", "+model.arguments.width=8", "model.arguments.widht=64"],
            "did you mean model.arguments.width?",
        ),
        (["model=hf_gpt2", "model.settings.n_layr=3"], "did you mean model.settings.n_layer?"),
        (["sweeps=fixd_global_batch"], "fixd_global_batch; did you mean fixed_global_batch?"),
        (["model=gtp_nano"], "model has no option gtp_nano; did you mean gpt_nano?"),
        (["--cnfg", "job"], "there is no option --cnfg; did you mean --cfg?"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_misspelt_settings_are_answered_with_the_right_ones(
    argv: list[str], hint: str, capsys: Captured
) -> None:
    error = error_of(capsys, ["plan", *argv], 2)
    assert hint in error
    assert "+model" not in error


def test_interrupted_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("batchscape.plan.build.make_plan", stopped)
    assert main(["plan"]) == 130


def test_a_bare_word_is_answered_with_how_to_choose_a_study(capsys):
    assert main(["plan", "fixed_global_batch"]) == 2
    assert "sweeps=fixed_global_batch" in capsys.readouterr().err


def test_a_setting_of_another_option_is_named_so(capsys):
    assert main(["plan", "model=mlp", "data=digits", "data.sequence_length=4"]) == 2
    assert "no setting of the chosen option of data" in capsys.readouterr().err


def test_a_study_without_its_package_line_is_explained(tmp_path, capsys):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("budget: {samples: 64}\n")
    assert main(["plan", "--config-dir", str(tmp_path), "sweeps=mine"]) == 2
    assert "# @package _global_" in capsys.readouterr().err


def test_a_report_of_several_sweeps_needs_a_place(capsys):
    assert main(["report", "one", "two"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_run_is_code_1(capsys: Captured) -> None:
    long = ["budget.samples=320000", "launcher.timeout_s=0.5"]
    assert main(["sweep", "seed=0", *QUICK, *long]) == 1
    (folder,) = Path("outputs").iterdir()
    (run,) = SweepFolder(folder).run_folders()
    assert RunStatus.read(run.status).status is Status.TIMEOUT
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
