"""Commands that are printed do what they say: each is taken apart by a shell, composed, and run."""

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import assume, example, given
from hypothesis import strategies as st

from batchscape.analysis.claims.declared import CLAIMS
from batchscape.analysis.decisions.evidence import gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.analysis.report.write import write_report
from batchscape.cli import main
from batchscape.compose import compose
from batchscape.data.corpus import prepare
from batchscape.launch.devices import OTHER_LAUNCHER
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.record.commands import (
    LaunchedRun,
    changed_command,
    command_of,
    more_seeds,
    time_again,
)
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import next_timing_repeat
from batchscape.record.status import RunStatus
from batchscape.record.tables import load
from batchscape.record.timing import BUSY, processes_share, runs_share, why_untimed

TINY = [
    *("seed=0,1", "model=gpt_micro", "batch.data_parallel_size=1", "batch.global_batch_size=8"),
    *("batch.micro_batch_size=4,8", "launcher.device=cpu", "data.sequence_length=16"),
    *("budget.samples=160", "evaluation.every_samples=160", "evaluation.samples=16"),
    *("measure.memory=false", "tracker=none", "measure.warmup_optimizer_steps=2"),
]


def planned(command):
    """What `batchscape plan` does, by the words that a shell makes of a command."""
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("batchscape", "sweep")
    grid = compose(arguments, "batchscape plan")
    assert grid is not None
    return make_plan(grid, Machine.detect(), prepare)


def to_do(plan):
    """Runs that a sweep of this plan would start."""
    sweep = SweepFolder(plan.sweep_dir)
    statuses = {spec.run_id: sweep.run(spec.run_id).status for spec in plan.specs}
    return [
        run_id
        for run_id, path in statuses.items()
        if not path.exists() or not RunStatus.read(path).status.is_sealed
    ]


def commands_in(text):
    """Commands of sweeps in a text: each stands at the end of its sentence or line."""
    commands = re.findall(r"batchscape sweep [^\n`]*", text)
    return [part for command in commands for part in command.rstrip(". ").split(" && ")]


def printed(report, *others):
    lines = [
        line
        for section in report.sections
        for line in (*section.answer, *section.settling_runs, *section.warnings)
    ]
    notes = [
        note
        for section in report.sections
        for view in section.tables
        for note in view.texts.footnotes.values()
    ]
    return "\n".join([*lines, *notes, *report.notes, *others])


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs the command line in an empty folder, and returns what it said."""
    monkeypatch.chdir(tmp_path)

    def call(arguments, capsys):
        capsys.readouterr()
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_the_printed_remedy_gives_times_or_says_why_not(sweep, capsys):
    """Two at a time have no times; the command in the last line runs each once more, alone."""
    arguments = [*TINY, "launcher.concurrent_runs=2", "sweep_dir='my sweep, 1'"]
    output = sweep(["sweep", *arguments], capsys)
    last = output.rstrip().splitlines()[-1]
    assert last.startswith(
        "4 of 4 completed runs have no times that count: up to 2 runs share the machine (4). "
    )
    (remedy,) = commands_in(last)
    recorded = [
        read_json(f.launch)["command"] for f in SweepFolder(Path("my sweep, 1")).run_folders()
    ]
    assert recorded == [command_of(arguments)] * 4

    report = write_report([Path("my sweep, 1")], with_charts=False)
    (evidence,) = gather([Path("my sweep, 1")])
    chosen = recommend(evidence, Needs())
    assert chosen.geometry is None
    remedies = [
        *commands_in(chosen.headline),
        *(
            command
            for text in chosen.missing
            if "the time of a step" in text
            for command in commands_in(text)
        ),
        *(command for note in report.notes for command in commands_in(note)),
    ]
    assert remedies == [remedy] * 3

    second_output = sweep(shlex.split(remedy)[1:], capsys)
    assert "4 runs: 4 completed" in second_output
    runs = load(Path("my sweep, 1")).runs
    assert sorted(runs["timing_repeat"]) == [0] * 4 + [1] * 4
    assert runs["sweep_name"].nunique() == 1
    repeated = write_report([Path("my sweep, 1")], with_charts=False).comparison
    second = [
        why_untimed(read_json(folder.launch), RunStatus.read(folder.status).summary)
        for folder in SweepFolder(Path("my sweep, 1")).run_folders()
        if read_json(folder.config)["config"]["timing_repeat"] == 1
    ]
    assert set(second) <= {None, BUSY, OTHER_LAUNCHER}
    assert repeated["step_time_s_n"].sum() == second.count(None)
    if any(second):
        # A machine that is not free now: said, with the next number.
        last = second_output.rstrip().splitlines()[-1]
        assert f"{4 - second.count(None)} of 4 completed runs have no times that count: " in last
        assert "timing_repeat=2" in last
    else:
        assert "no times that count" not in second_output


@pytest.mark.slow
def test_every_printed_command_composes_and_finds_runs_to_do(sweep, capsys):
    """Of a sweep that is done: those of its own with what is missing, and known studies."""
    folder = Path("done")
    one_seed = [setting for setting in TINY if not setting.startswith("seed=")]
    sweep(
        ["sweep", *one_seed, "seed=0", "launcher.concurrent_runs=2", f"sweep_dir={folder}"], capsys
    )
    report = write_report([folder], with_charts=False)
    (evidence,) = gather([folder])
    recommendation = recommend(evidence, Needs())
    commands = set(commands_in(printed(report, recommendation.headline, *recommendation.missing)))
    own_commands = {
        command for command in commands if f'sweep_dir="{folder}"' in shlex.split(command)[-1]
    }
    seeds = {command for command in own_commands if "seed=0,1,2" in command}
    times = {command for command in own_commands if "timing_repeat=1" in command}
    assert seeds
    assert times
    # Those of claims are planned by `test_the_command_that_settles_it_is_a_plan`.
    of_claims = {claim.settle for claim in CLAIMS}
    assert len(commands & of_claims) > 5
    runs_to_do = {command: len(to_do(planned(command))) for command in sorted(commands - of_claims)}
    assert min(runs_to_do.values()) > 0, runs_to_do
    assert [runs_to_do[command] for command in times] == [2] * len(times)
    # A claim asks for ten seeds, of which one is done, a recommendation for three.
    assert {runs_to_do[command] for command in seeds} <= {2 * 9, 2 * 2}


def settings_of(command):
    """The last value of each setting, as Hydra reads it."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("batchscape", "sweep")
    parsed = OverridesParser.create().parse_overrides([w for w in words if "=" in w])
    assert len({o.get_key_element() for o in parsed}) == len(parsed)
    return {o.get_key_element(): o.value() for o in parsed}


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12))
@example("it's \\'quoted\\")
@example("123")
@example("null")
@example("a b/c, d=e")
@example("\N{SNOWMAN}\\")
def test_a_folder_of_any_name_is_named(name):
    assume("${" not in name)
    value = settings_of(changed_command("batchscape sweep sweeps=x sweep_dir=old", name, {}))[
        "sweep_dir"
    ]
    assert (value.text if isinstance(value, QuotedString) else value) == name


def test_a_command_is_recorded_without_what_was_to_be_repeated():
    arguments = [
        "--multirun",
        "--config-dir",
        "my dir",
        "--retry",
        "oom,failed",
        "a=1,2",
        "b=[x y]",
    ]
    assert shlex.split(command_of(arguments)) == [
        *("batchscape", "sweep", "--config-dir", "my dir", "a=1,2", "b=[x y]")
    ]
    assert command_of(["--retry=all", "-m", "a=1"]) == "batchscape sweep a=1"


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        (runs_share(2, "the machine"), {"timing_repeat": 3, "launcher.concurrent_runs": 1}),
        (
            f"{runs_share(4, 'a device')}; {OTHER_LAUNCHER}",
            {"timing_repeat": 3, "launcher.concurrent_runs": 1},
        ),
        (BUSY, {"timing_repeat": 3, "launcher.concurrent_runs": 4}),
        (
            f"an earlier attempt: {OTHER_LAUNCHER}",
            {"timing_repeat": 3, "launcher.concurrent_runs": 4},
        ),
        # More processes than there is room for: no repetition helps.
        (processes_share("4 ranks", "2 cores"), None),
        (processes_share("1 rank with 2 loader workers, 3 processes,", "2 cores"), None),
        (f"{processes_share('2 ranks', '1 CUDA device')}; {runs_share(2, 'the machine')}", None),
    ],
)
def test_a_remedy_has_what_makes_it_work(reason, settings):
    command = "batchscape sweep sweeps=mine seed=0,1 launcher.concurrent_runs=4 timing_repeat=0,1"
    remedy = time_again([LaunchedRun("out/a", command, reason)] * 2, {"out/a": 3})
    if settings is None:
        assert remedy is None
        return
    assert remedy is not None
    assert "launcher.concurrent_runs=4,1" not in remedy
    remedy_settings = settings_of(remedy)
    kept = {"sweeps": "mine", "sweep_dir": "out/a"}
    assert {name: remedy_settings[name] for name in (*settings, *kept)} == settings | kept


def test_runs_of_several_commands_are_measured_by_each():
    first, second = "batchscape sweep sweeps=a", "batchscape sweep sweeps=b"
    remedy = time_again(
        [
            LaunchedRun("out/a", first, "up to 2 runs share the machine"),
            LaunchedRun("out/a", first, BUSY),
            LaunchedRun("out/b", second, BUSY),
            LaunchedRun("out/b", None, BUSY),
            LaunchedRun("out/b", "batchscape sweep sweeps=c"),
        ],
        {"out/a": 2, "out/b": 5},
    )
    assert remedy == (
        "batchscape sweep sweeps=a launcher.concurrent_runs=1 timing_repeat=2 sweep_dir=out/a && "
        "batchscape sweep sweeps=b timing_repeat=5 sweep_dir=out/b"
    )
    assert time_again([LaunchedRun("out/b", None, BUSY)], {}) is None
    assert more_seeds(
        [LaunchedRun("out/a", f"{first} seed=7"), LaunchedRun("out/b", None)], range(3)
    ) == ("batchscape sweep sweeps=a seed=0,1,2 sweep_dir=out/a")


def test_the_next_repeat_is_above_all_of_the_folder(tmp_path):
    sweep = SweepFolder(tmp_path)
    assert next_timing_repeat(sweep) == 0
    for name, repeat in (("a", 0), ("b", 4), ("c", 1)):
        write_json(sweep.run(name).config, {"config": {"timing_repeat": repeat}})
    sweep.run("d").path.mkdir()
    assert next_timing_repeat(sweep) == 5
