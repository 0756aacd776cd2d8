"""Runs that begin alike: what is shared, by brute force, and real runs that go on from others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sweeps_of_fakes import spec_named

from batchscape.analysis.cells import find_cells
from batchscape.analysis.report.notes import find_notes
from batchscape.cli import main
from batchscape.config import Constant, Cosine, Schedule, WarmupStableDecay
from batchscape.geometry import BatchGeometry
from batchscape.launch.beginnings import shared_beginnings, shared_steps
from batchscape.launch.schedule import launch_order
from batchscape.record.files import write_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec, Stage
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load, read_table
from batchscape.text import count_text
from batchscape.train.timeline import Timeline, schedule_factor
from exact import assert_same_rows

SCHEDULES = st.one_of(
    st.builds(Constant, name=st.just("constant"), warmup_samples=st.sampled_from([0, 8, 20])),
    st.builds(
        Cosine,
        name=st.just("cosine"),
        warmup_samples=st.sampled_from([0, 8, 20]),
        decay_samples=st.sampled_from([None, 64]),
    ),
    st.builds(
        WarmupStableDecay,
        name=st.just("wsd"),
        warmup_samples=st.sampled_from([0, 8, 20]),
        decay_samples=st.sampled_from([8, 20, 40]),
    ),
)
STAGES = st.lists(
    st.tuples(st.integers(1, 8), st.sampled_from([2, 4, 8]), st.sampled_from([1.0, 2.0])),
    min_size=1,
    max_size=3,
)
BASE = spec_named("completes", share_beginnings=True)


def spec_of(stages: list[tuple[int, int, float]], schedule: Schedule) -> RunSpec:
    """Return a run of stages, each so many steps of a global batch at a rate."""
    optimizer = BASE.config.optimizer
    made: list[Stage] = []
    for steps, size, rate in stages:
        stage = Stage(
            steps * size, BatchGeometry(1, 1, size, 1), replace(optimizer, learning_rate=rate)
        )
        alike = made and (made[-1].geometry, made[-1].optimizer) == (
            stage.geometry,
            stage.optimizer,
        )
        samples = made.pop().samples if alike else 0
        made.append(replace(stage, samples=samples + stage.samples))
    config = replace(BASE.config, schedule=schedule)
    return replace(BASE, run_id=repr((made, schedule)), stages=tuple(made), config=config)


def steps_of(spec: RunSpec) -> list[tuple[Any, ...]]:
    """Return what determines each optimizer step."""
    timeline = Timeline(spec.stages)
    planned = [timeline.step(k) for k in range(spec.optimizer_steps)]
    return [
        (
            step.stage.geometry,
            step.stage.optimizer,
            schedule_factor(spec.config.schedule, step.midpoint, spec.samples),
        )
        for step in planned
    ]


def fits(spec: RunSpec) -> bool:
    """Whether the parts of a schedule follow each other within the budget, as a plan demands."""
    schedule = spec.config.schedule
    if isinstance(schedule, Cosine):
        return schedule.warmup_samples < (schedule.decay_samples or spec.samples)
    decay = schedule.decay_samples if isinstance(schedule, WarmupStableDecay) else 0
    return schedule.warmup_samples + decay <= spec.samples


def plain_until(spec: RunSpec) -> int:
    """Return the last sample up to which a schedule is a warm-up and its peak, sample by sample."""
    schedule = spec.config.schedule
    for sample in range(spec.samples + 1):
        warm = min(1.0, sample / schedule.warmup_samples) if schedule.warmup_samples else 1.0
        if schedule_factor(schedule, sample, spec.samples) != warm:
            return sample - 1
    return spec.samples


@given(STAGES, STAGES, SCHEDULES, SCHEDULES, st.booleans(), st.booleans())
def test_what_is_shared_is_what_is_equal_step_by_step(
    stages: Any, others: Any, schedule: Schedule, other: Schedule, same: bool, alike: bool
) -> None:
    other = schedule if same else replace(other, warmup_samples=schedule.warmup_samples)
    one = spec_of(stages, schedule)
    two = spec_of(stages[:-1] + others if alike else others, other)
    assume(fits(one) and fits(two))
    equal = 0
    for step, other_step in zip(steps_of(one), steps_of(two), strict=False):
        if step != other_step:
            break
        equal += 1
    shared = shared_steps(one, two)
    assert shared <= equal
    assert shared == shared_steps(two, one)
    # What is equal beyond is chance: a step on which two decays cross, or one whose middle lies in
    # the plain part and whose end does not.
    plain, timeline = min(plain_until(one), plain_until(two)), Timeline(one.stages)
    in_plain_part = [k for k in range(equal) if timeline.step(k).samples_after <= plain]
    assert shared >= len(in_plain_part)
    if schedule == other and one.samples == two.samples:
        assert shared == equal


def test_no_shared_step_is_trained_twice() -> None:
    """Over all runs, the steps that are trained are those that differ."""
    constant = Constant(name="constant")
    specs = [
        spec_of([(n, 4, 1.0), (m, 8, rate)], constant)
        for n in (20, 40, 60)
        for m in (30, 60)
        for rate in (1.0, 2.0)
    ]
    specs = [
        replace(
            spec,
            config=replace(
                spec.config, measure=replace(spec.config.measure, warmup_optimizer_steps=0)
            ),
        )
        for spec in specs
    ]
    beginnings = shared_beginnings(specs)
    trained = sum(
        spec.optimizer_steps
        - (beginnings[spec.run_id].optimizer_steps if spec.run_id in beginnings else 0)
        for spec in specs
    )
    distinct = {
        tuple(map(repr, steps_of(spec)[: k + 1]))
        for spec in specs
        for k in range(spec.optimizer_steps)
    }
    # Of two runs of which one is the beginning of the other, the longer has a step of its own.
    assert trained == len(distinct)


@pytest.mark.parametrize("steps", [(40, 60, 50), (400, 600, 410), (40, 60, 45), (60, 40, 50)])
def test_a_trunk_trains_the_steps_after_which_it_is_left(steps: tuple[int, ...]) -> None:
    specs = [spec_of([(n, 4, 1.0)], Constant(name="constant")) for n in steps]
    beginnings = shared_beginnings(specs)
    assert len(beginnings) == 2
    for beginning in beginnings.values():
        own = beginnings.get(beginning.trunk)
        assert beginning.optimizer_steps > (0 if own is None else own.optimizer_steps)


SMALL = (
    *("sweep", "model=gpt_nano", "model.n_layers=1", "model.d_model=16", "model.n_heads=2"),
    *("data=stdlib", "data.sequence_length=16", "optimizer=adamw", "launcher.device=cpu"),
    *("batch.global_batch_size=8", "batch.micro_batch_size=4", "tracker=none"),
    *("measure.warmup_optimizer_steps=1", "measure.noise_scale_every=3", "measure.memory=false"),
    *("evaluation.samples=16", "evaluation.batch_size=8", "evaluation.every_samples=32"),
    *("engine.precision=float64", "checkpoint.every_s=null", "launcher.share_beginnings=true"),
)
HORIZONS = ("schedule=wsd", "schedule.warmup_samples=16", "schedule.decay_samples=32")
CURVE = ["optimizer_step", "samples", "tokens", "loss", "gradient_norm", "learning_rate",
         "small_gradient_square", "global_batch_size"]  # fmt: skip
HELD_OUT = ["optimizer_step", "samples", "tokens", "eval_loss"]


def assert_same_curves(sweep: SweepFolder, alone: SweepFolder) -> None:
    names = [folder.path.name for folder in alone.run_folders()]
    assert [folder.path.name for folder in sweep.run_folders()] == names
    for name in names:
        for table, columns in (("steps", CURVE), ("evals", HELD_OUT)):
            ours, theirs = (read_table(s.run(name), table)[columns] for s in (sweep, alone))
            assert_same_rows(ours, theirs)


def begun(sweep: SweepFolder) -> dict[int, int]:
    """Return the optimizer steps that runs have from others, by their own number of steps."""
    runs = load(sweep.path).runs
    return {
        int(row.optimizer_steps): RunStatus.read(sweep.run(row.run_id).status)
        .attempts[0]
        .from_optimizer_step
        for row in runs.itertuples()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (
            *(*HORIZONS, "budget.samples=96,256", "evaluation.ema_half_life_tokens=500"),
            *("batch.data_parallel_size=2", "loader.workers=1"),
        ),
        (
            "budget.samples=192",
            "batch.data_parallel_size=1",
            "batch.ramp=[],[{samples:64,global_batch_size:4}],"
            "[{samples:64,global_batch_size:4},{samples:64,global_batch_size:16}]",
        ),
    ],
    ids=["horizons, average, two ranks and workers", "ramps"],
)
def test_runs_that_begin_as_others_are_those_that_train_alone(
    settings: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, alone = SweepFolder(tmp_path / "shared"), SweepFolder(tmp_path / "alone")
    assert main([*SMALL, *settings, f"sweep_dir={shared.path}"]) == 0, capsys.readouterr()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Runs that begin as another one, and go on from its state: " in printed
    off = ["launcher.share_beginnings=false", f"sweep_dir={alone.path}"]
    assert main([*SMALL, *settings, *off]) == 0, capsys.readouterr()
    assert "begin as another" not in capsys.readouterr().out
    assert_same_curves(shared, alone)
    assert set(begun(alone).values()) == {0}
    statuses = [RunStatus.read(folder.status) for folder in shared.run_folders()]
    n_begun = sum(status.attempts[0].from_optimizer_step > 0 for status in statuses)
    assert n_begun >= 1
    assert not list(shared.path.glob("runs/*/branches/*")), "nobody needs them any more"
    tables = load(shared.path)
    notes = find_notes(find_cells(tables.runs), tables.damaged)
    assert any(note.startswith(f"{count_text(n_begun, 'run')} began as another") for note in notes)
    for folder in shared.run_folders():
        steps = read_table(folder, "steps")
        of_trunk = steps["attempt"] == -1
        first = RunStatus.read(folder.status).attempts[0].from_optimizer_step
        assert of_trunk.sum() == first
        assert steps["warmup"][of_trunk].all(), "times are those of its own steps"


LADDER = ("schedule=constant", "budget.samples=96,192", "batch.data_parallel_size=1")


def trained_alone(path: Path, *settings: str) -> SweepFolder:
    """Return runs each of which trained all of its steps."""
    off = ("launcher.share_beginnings=false", f"sweep_dir={path}")
    assert main([*SMALL, *settings, *off]) == 0
    return SweepFolder(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """Those of `LADDER`; the folder is read only."""
    return trained_alone(tmp_path_factory.mktemp("ladder") / "alone", *LADDER)


def by_steps(sweep: SweepFolder) -> dict[int, RunFolder]:
    """Return the runs of a plan by their number of steps."""
    specs = [RunSpec.read(folder.config) for folder in sweep.run_folders()]
    return {spec.optimizer_steps: sweep.run(spec.run_id) for spec in specs}


def sharing(spec: RunSpec) -> RunSpec:
    launcher = replace(spec.config.launcher, share_beginnings=True)
    return replace(spec, config=replace(spec.config, launcher=launcher))


@pytest.mark.slow
def test_a_later_command_begins_with_a_state_that_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, alone = SweepFolder(tmp_path / "sweep"), SweepFolder(tmp_path / "alone")
    first = [*SMALL, *LADDER[::2], f"sweep_dir={sweep.path}"]
    off = ("launcher.share_beginnings=false", f"sweep_dir={alone.path}")
    assert main([*SMALL, *LADDER[::2], "budget.samples=128,192", *off]) == 0
    assert main([*first, "budget.samples=192", "checkpoint.keep_at_samples=[64,96]"]) == 0
    (trunk,) = sweep.run_folders()
    assert [path.name[-2:] for path in trunk.branch_points()] == ["08", "12"]
    capsys.readouterr()
    assert main(["plan", *first[1:], "budget.samples=128"]) == 0
    spared = "Runs that begin as another one, and go on from its state: 1; that spares 75%"
    assert spared in " ".join(capsys.readouterr().out.split())
    assert main([*first, "budget.samples=128"]) == 0
    assert begun(sweep) == {16: 12, 24: 0}
    assert_same_curves(sweep, alone)
    assert main([*first, "budget.samples=128,192"]) == 0
    assert len(trunk.branch_points()) == 2, "another command may begin with them"


def test_a_state_is_kept_between_steps(capsys: pytest.CaptureFixture[str]) -> None:
    keep = ["budget.samples=192", "checkpoint.keep_at_samples=[68]"]
    assert main(["plan", *SMALL[1:], *keep]) == 2
    assert "68 samples end within an optimizer step; use 64 or 72" in capsys.readouterr().err


@pytest.mark.slow
def test_where_no_state_was_kept_a_run_trains_all_of_its_steps(
    tmp_path: Path, alone: SweepFolder
) -> None:
    """A trunk that was done before, and one that has failed, have none."""
    sweep = SweepFolder(tmp_path / "sweep")
    command = [*SMALL, *LADDER, f"sweep_dir={sweep.path}"]
    assert main([*command, "budget.samples=96"]) == 0
    assert main(command) == 0
    assert begun(sweep) == {12: 0, 24: 0}
    assert_same_curves(sweep, alone)
    # Of the two the longer one is the trunk, or the shorter; both ways the other one goes on alone.
    for steps, folder in by_steps(alone).items():
        failed = SweepFolder(tmp_path / f"failed-{steps}")
        shutil.copytree(folder.path, failed.run(folder.path.name).path)
        status = RunStatus.read(failed.run(folder.path.name).status)
        broken = replace(status, status=Status.FAILED, cause=Cause.EXCEPTION, seal={})
        broken.write(failed.run(folder.path.name).status)
        assert main([*SMALL, *LADDER, f"sweep_dir={failed.path}"]) == 1
        (other,) = (f for n, f in by_steps(failed).items() if n != steps)
        status = RunStatus.read(other.status)
        assert status.status is Status.COMPLETED
        assert status.attempts[0].from_optimizer_step == 0


@pytest.mark.slow
def test_a_damaged_state_is_said_and_all_steps_are_trained(
    tmp_path: Path, alone: SweepFolder
) -> None:
    sweep = SweepFolder(tmp_path / "sweep")
    assert main(["plan", *SMALL[1:], *LADDER, f"sweep_dir={sweep.path}"]) == 0
    specs = [RunSpec.read(folder.config) for folder in alone.run_folders()]
    (branch,) = shared_beginnings(launch_order([sharing(spec) for spec in specs]))
    beginning = sweep.run(branch).beginning
    beginning.mkdir(parents=True)
    (beginning / f"step-000000012-{'0' * 16}.pt").write_bytes(b"torn")
    write_json(beginning / "origin.json", {"trunk": "another", "optimizer_steps": 12})
    shutil.copyfile(alone.run(branch).launch, beginning / "launch.json")
    assert main([*SMALL, *LADDER, f"sweep_dir={sweep.path}"]) == 0
    assert "cannot be used" in sweep.run(branch).log.read_text()
    assert "the run begins anew" in sweep.run(branch).log.read_text()
    assert_same_curves(sweep, alone)
    assert not beginning.exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_launchers_train_nothing_twice(tmp_path: Path) -> None:
    ladder = ("schedule=constant", "budget.samples=96,192,288", "batch.data_parallel_size=1")
    sweep, alone = SweepFolder(tmp_path / "sweep"), trained_alone(tmp_path / "alone", *ladder)
    command = [*SMALL, *ladder, f"sweep_dir={sweep.path}", "launcher.concurrent_runs=2"]
    both = [
        subprocess.Popen([sys.executable, "-m", "batchscape", *command], cwd=tmp_path)
        for _ in range(2)
    ]
    assert [one.wait() for one in both] == [0, 0]
    assert_same_curves(sweep, alone)
    # 12, 24 and 36 steps: 36 are trained, whoever the trunks are.
    own = 0
    for folder in sweep.run_folders():
        steps = read_table(folder, "steps")
        own += int((steps["attempt"] >= 0).sum())
        assert len(RunStatus.read(folder.status).attempts) == 1
    assert own <= 36 + 2 * 3, "but for the steps that are timed"
    assert not list(sweep.path.glob("runs/*/branches"))


def test_a_plan_says_what_is_spared(capsys: pytest.CaptureFixture[str]) -> None:
    hours = {}
    long = ("budget.samples=960,1920", "evaluation.every_samples=null", "evaluation.samples=1")
    # Peaks of this processor are measured anew by each plan.
    long += ("cluster=a100_80g", "launcher.device=auto", "engine.precision=float32")
    for shared in ("true", "false"):
        share = f"launcher.share_beginnings={shared}"
        assert main(["plan", *SMALL[1:], *LADDER, *long, share, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        hours[shared] = plan["sweep"]["device_hours"]["value"]
    # 120 of 360 optimizer steps.
    assert hours["true"] / hours["false"] == pytest.approx(2 / 3, abs=0.05)
    assert main(["plan", *SMALL[1:], *LADDER, *long]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    # 120 where the shorter one is the trunk; else it keeps three steps of its own.
    assert re.search(
        r"begin as another one, and go on from its state: 1; that spares 3[23]%", printed
    )
