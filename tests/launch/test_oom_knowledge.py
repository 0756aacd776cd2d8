"""What runs out of memory tell: which others are not launched, and when they are after all."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named

from batchscape.config import RunConfig
from batchscape.cuda_devices import CudaDevice
from batchscape.geometry import BatchGeometry
from batchscape.launch.launcher import Launcher
from batchscape.launch.oom_knowledge import OomKnowledge
from batchscape.launch.result import SweepResult
from batchscape.plan.machine import Machine
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, Cause, RunStatus, Status

LIMIT = {"device": {"memory_limit_gib": 0.5}}


def run(name: str, *cuts: tuple[int, int], ranks: int = 1, **launcher: Any) -> RunSpec:
    """Return a run of one stage a cut: micro-batch and accumulation."""
    spec = spec_named(name, ranks, **launcher)
    stages = [
        replace(
            spec.stages[0],
            samples=3 * ranks * micro * accumulation,
            geometry=BatchGeometry(1, ranks, micro, accumulation),
        )
        for micro, accumulation in cuts
    ]
    return replace(spec, stages=tuple(stages))


def changed(spec: RunSpec, **groups: Any) -> RunSpec:
    """Return a run with other settings: `group={name: value}` or `setting=value`."""
    mapping = spec.config.to_mapping()
    for group, values in groups.items():
        both = isinstance(values, dict) and mapping.get(group) and "name" not in values
        mapping[group] = mapping[group] | values if both else values
    return replace(spec, config=RunConfig.from_mapping(mapping))


class Folder:
    """A sweep folder of runs that have ended, as a launcher leaves them."""

    def __init__(self, path: Path) -> None:
        self.sweep = SweepFolder(path)

    def write(self, spec: RunSpec, status: Status = Status.OOM, **about: Any) -> None:
        """Leave a run; `about` has the cause, the phase and what `launch.json` says otherwise."""
        end = {"cause": Cause.OUT_OF_MEMORY, "phase": "forward"}
        end |= {name: about.pop(name) for name in ("cause", "phase") if name in about}
        folder = self.sweep.run(spec.run_id)
        spec.write(folder.config)
        write_json(
            folder.launch,
            {
                "device_model": "a processor",
                "devices": list(range(spec.geometry.data_parallel_size)),
                "concurrent_runs": 1,
                "runs_per_device": 1,
                "timing_invalid_reason": None,
                **about,
            },
        )
        RunStatus(status, attempts=[Attempt(0.0, 0)], **end).write(folder.status)

    def refusal(
        self,
        spec: RunSpec,
        machine: Machine = MACHINE,
        predictions: dict[str, Any] | None = None,
    ) -> str | None:
        """Ask for a run that was never begun."""
        folder = self.sweep.run(spec.run_id)
        spec.write(folder.config)
        RunStatus(Status.PENDING).write(folder.status)
        return OomKnowledge([spec], self.sweep, machine, predictions or {}).refusal(spec)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "sweep")


WITNESS = run("w", (16, 1))
LARGER = run("x", (32, 1))


def test_the_refusal_says_why_and_how_to_launch_all_the_same(folder: Folder) -> None:
    folder.write(changed(WITNESS, **LIMIT))
    folder.write(changed(run("v", (8, 1)), **LIMIT))
    assert folder.refusal(changed(LARGER, **LIMIT)) == (
        "not launched: micro_batch_size 8 ran out of memory with all else alike on 1 device of "
        "0.5 GiB each (run v), and 32 is larger; launcher.skip_unfit=false launches it"
    )
    tried = changed(LARGER, **LIMIT, launcher={"skip_unfit": False})
    assert folder.refusal(tried) is None


@pytest.mark.parametrize(("low", "is_refused"), [(0.49, False), (0.51, True)])
def test_what_is_predicted_to_need_more_than_there_is(
    folder: Folder, low: float, is_refused: bool
) -> None:
    spec = changed(LARGER, device={"memory_limit_gib": 0.5})
    peak = {"value": 0.6, "low": low, "high": 0.7, "method": "fake tensors"}
    predictions = {spec.run_id: {"peak_allocated_gib": peak}}
    reason = folder.refusal(spec, predictions=predictions)
    assert (reason is not None) == is_refused
    if reason is not None:
        assert "predicted to take at least 0.51 GiB on each device, and there are 0.5" in reason
    tried = changed(spec, launcher={"skip_unfit": False})
    assert folder.refusal(tried, predictions=predictions) is None


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"optimizer": {"learning_rate": 0.5}},
        {"budget": {"optimizer_steps": 9}},
        {"launcher": {"max_failures": 3}},
    ],
)
def test_what_decides_no_memory_may_differ(folder: Folder, change: dict[str, Any]) -> None:
    folder.write(WITNESS)
    assert folder.refusal(changed(LARGER, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"d_model": 4}},
        {"data": {"sequence_length": 8}},
        {"optimizer": {"name": "sgd", "learning_rate": 0.1}},
        {"engine": {"name": "fsdp"}},
        {"measure": {"noise_scale_every": None}},
        {"loader": {"workers": 1}},
        LIMIT,
    ],
)
def test_what_decides_memory_must_be_alike(folder: Folder, change: dict[str, Any]) -> None:
    folder.write(WITNESS)
    assert folder.refusal(changed(LARGER, **change)) is None


def test_devices_precision_and_code_must_be_alike(folder: Folder) -> None:
    folder.write(WITNESS)
    others = [
        run("x", (32, 1), ranks=2),
        replace(LARGER, precision="float64"),
        replace(LARGER, source_hash="another model"),
        replace(LARGER, data=replace(LARGER.data, manifest_hash="1")),
    ]
    assert [folder.refusal(other) for other in others] == [None] * 4
    assert folder.refusal(LARGER)


@pytest.mark.parametrize(
    ("witness", "cut", "refused"),
    [
        ([(16, 1)], [(17, 1)], True),
        ([(16, 1)], [(16, 1)], False),  # as large: another seed may just fit
        ([(16, 1)], [(8, 4)], False),
        ([(16, 1)], [(32, 4)], True),
        ([(16, 4)], [(32, 2)], True),
        ([(16, 4)], [(32, 1)], False),  # keeps no gradients between micro-steps
        ([(4, 1), (16, 1)], [(32, 1)], True),
        ([(16, 1)], [(4, 1), (32, 1)], True),  # ramps: the largest stage takes most
        ([(16, 1)], [(4, 1), (8, 1)], False),
        ([(16, 1), (8, 4)], [(12, 1), (32, 1)], False),  # whichever stage it was
        ([(16, 1), (8, 4)], [(9, 2), (32, 1)], True),
    ],
)
def test_larger_means_surely_more_memory(
    folder: Folder, witness: list[tuple[int, int]], cut: list[tuple[int, int]], refused: bool
) -> None:
    folder.write(run("w", *witness))
    assert (folder.refusal(run("x", *cut)) is not None) == refused


@pytest.mark.parametrize(
    ("status", "about"),
    [
        (Status.FAILED, {"cause": Cause.KILLED}),
        (Status.FAILED, {"cause": Cause.EXCEPTION}),
        (Status.COMPLETED, {"cause": None}),
        (Status.RUNNING, {"cause": None}),
        (Status.OOM, {"device_model": "another processor"}),
        (Status.OOM, {"concurrent_runs": 2}),
        (
            Status.OOM,
            {"timing_invalid_reason": "a; another launcher was at work on this machine"},
        ),
    ],
)
def test_only_memory_that_was_its_own_makes_a_witness(
    folder: Folder, status: Status, about: dict[str, Any]
) -> None:
    folder.write(WITNESS, status, **about)
    assert folder.refusal(LARGER) is None


def test_a_limit_is_a_memory_of_its_own(folder: Folder) -> None:
    folder.write(changed(WITNESS, **LIMIT), concurrent_runs=4)
    assert folder.refusal(changed(LARGER, **LIMIT))


def test_the_kernels_killer_counts_on_a_cpu_and_not_on_a_device(folder: Folder) -> None:
    """The host's memory is that of a CPU's ranks; on CUDA it says nothing of the device."""
    folder.write(WITNESS, phase=None)
    assert folder.refusal(LARGER)
    machine = Machine(2, "a processor", (CudaDevice(0, "a GPU", (9, 0), "GPU-0"),))
    cuda = [run(name, cut, device_type="cuda") for name, cut in (("cw", (16, 1)), ("cx", (32, 1)))]
    folder.write(cuda[0], phase=None, device_model="a GPU")
    assert folder.refusal(cuda[1], machine) is None
    folder.write(cuda[0], device_model="a GPU")
    assert folder.refusal(cuda[1], machine)
    folder.write(cuda[0], device_model="a GPU", runs_per_device=2)
    assert folder.refusal(cuda[1], machine) is None
    folder.write(cuda[0], device_model="a smaller GPU")
    assert folder.refusal(cuda[1], machine) is None


def test_a_damaged_folder_tells_nothing(folder: Folder) -> None:
    folder.write(WITNESS)
    folder.sweep.run("w").config.write_text("{")
    assert folder.refusal(LARGER) is None


def test_a_run_that_was_begun_is_known_better_by_itself(folder: Folder) -> None:
    folder.write(WITNESS)
    folder.write(LARGER, Status.INTERRUPTED, cause=Cause.INTERRUPTED)
    assert OomKnowledge([LARGER], folder.sweep, MACHINE, {}).refusal(LARGER) is None


Launch = Callable[..., SweepResult]


@pytest.fixture
def launch(folder: Folder) -> Launch:
    """Launch with real processes; what was printed is in `launch.printed`."""

    def start(*specs: RunSpec) -> SweepResult:
        output = io.StringIO()
        console = Console(file=output, width=300)
        result = Launcher(
            folder.sweep, MACHINE, specs, entry=ENTRY, method="spawn", console=console
        ).run()
        start.printed = output.getvalue()  # type: ignore[attr-defined]
        return result

    return start


def statuses(result: SweepResult) -> dict[str, str]:
    return {run.run_id: str(run.status) for run in result.runs}


def test_a_sweep_launches_nothing_larger_than_what_ran_out(folder: Folder, launch: Launch) -> None:
    def specs(**launcher: Any) -> list[RunSpec]:
        return [
            run("completes-8", (8, 1), **launcher),
            run("runsout-16", (16, 1), **launcher),
            run("completes-16-later", (16, 1), **launcher),
            run("completes-32-later", (32, 1), **launcher),
        ]

    expected = {
        "completes-8": "completed",
        "runsout-16": "oom",
        "completes-16-later": "completed",
        "completes-32-later": "rejected",
    }
    result = launch(*specs())
    assert statuses(result) == expected
    assert [run.run_id for run in result.failed] == ["runsout-16"]
    skipped = RunStatus.read(folder.sweep.run("completes-32-later").status)
    assert (skipped.status, skipped.cause) == (Status.REJECTED, Cause.OUT_OF_MEMORY)
    reason = "not launched: micro_batch_size 16 ran out of memory"
    assert str(skipped.reason).startswith(reason)
    assert "(run runsout-16), and 32 is larger" in str(skipped.reason)
    assert f"completes-32-later rejected: {reason}" in launch.printed  # type: ignore[attr-defined]
    assert not folder.sweep.run("completes-32-later").launch.exists()
    # The next launch knows it from the folder, and reconsiders.
    assert statuses(launch(*specs())) == expected
    tried = launch(*specs(skip_unfit=False))
    assert statuses(tried) == expected | {"completes-32-later": "completed"}


def test_a_run_that_is_to_run_again_tells_nothing_until_it_has(folder: Folder) -> None:
    for micro in (8, 16):
        folder.write(run(f"w{micro}", (micro, 1)))
    queue = [run("w8", (8, 1)), LARGER]
    LARGER.write(folder.sweep.run("x").config)
    RunStatus(Status.PENDING).write(folder.sweep.run("x").status)
    knowledge = OomKnowledge(queue, folder.sweep, MACHINE, {})
    assert "(run w16)" in str(knowledge.refusal(LARGER))
    knowledge.learn(queue[0])
    assert "(run w8)" in str(knowledge.refusal(LARGER))
