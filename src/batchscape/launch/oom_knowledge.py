"""Which runs cannot fit: by what is predicted of them, and by others that are out of memory.

A run whose tensors alone are predicted to take more than there is need not be tried.

A run out of memory is a witness for every run with all else alike that decides memory: devices,
model, data, engine, precision, optimizer, limit of memory, evaluation batch and so on. It rules out
those with a larger micro-batch. One of the same micro-batch (another seed, say) is still run: the
witness may have been just too large. Neither does a witness that accumulates rule out a run that
does not, however large: gradients that are kept between micro-steps take memory too, as much as a
whole model with some engines.

Only an allocator's own word makes a witness (and on a CPU the cgroup's), never a process that was
killed for reasons unknown; and only a run that had its device to itself, or its own limit of
memory. Where the memory that ran out is not that of the training (an evaluation's, the host's of a
device, or of a device that others share), the run is no `oom` in the first place:
`train.failures`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchscape.config import Affects, that_affect
from batchscape.errors import BatchscapeError
from batchscape.launch.launch_record import OTHER_LAUNCHER
from batchscape.plan.room import room_gib
from batchscape.record.causes import Cause
from batchscape.record.disk import read_each
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["OomKnowledge", "ran_on", "reject"]


class OomKnowledge:
    """What the runs of one sweep folder, on one machine, tell of the runs that are still to go.

    Parameters
    ----------
    queue : sequence of RunSpec
        Runs to launch. One among them that ran out of memory before is no witness until it has
        ended again.
    sweep : SweepFolder
        Runs of earlier launches count.
    machine : Machine
        Those that ran out of memory on other devices do not.
    predictions : mapping of str to mapping
        What `prediction.json` holds, by run.
    """

    def __init__(
        self,
        queue: Sequence[RunSpec],
        sweep: SweepFolder,
        machine: Machine,
        predictions: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._sweep = sweep
        self._predictions = predictions
        self._machine = machine
        self._witnesses: defaultdict[str, dict[str, RunSpec]] = defaultdict(dict)
        self._reconsidered: set[str] = set()
        queued = {spec.run_id: spec for spec in queue}
        if not any(spec.config.launcher.skip_unfit for spec in queue):
            return
        for spec in read_each(self._witness_in, sweep.run_folders(), sweep.path):
            if spec is not None and spec.run_id in queued:
                self._reconsidered.add(spec.run_id)
            elif spec is not None:
                self._witnesses[_memory_key(spec)][spec.run_id] = spec

    def first_the_witnesses(self, queue: Iterable[RunSpec]) -> list[RunSpec]:
        """Put runs ahead that were out of memory and are tried again, the smallest first."""

        def key(spec: RunSpec) -> int:
            again = spec.run_id in self._reconsidered
            return spec.geometry.micro_batch_size if again else 2**63

        return sorted(queue, key=key)

    def refusal(self, spec: RunSpec) -> str | None:
        """Say why a run need not be launched; None where it is to be tried.

        Parameters
        ----------
        spec : RunSpec
            A run that was begun before is tried: it is known better than by its likes.

        Raises
        ------
        RecordError
            If its folder is damaged.
        """
        if not spec.config.launcher.skip_unfit:
            return None
        witnesses = self._witnesses.get(_memory_key(spec), {}).values()
        larger_than = [witness for witness in witnesses if _needs_more(spec, witness)]
        predicted = self._unfit(spec)
        if not (predicted or larger_than):
            return None
        if RunStatus.read(self._sweep.run(spec.run_id).status).attempts:
            return None
        if predicted:
            return predicted
        witness = min(larger_than, key=lambda found: (_micro(found), found.run_id))
        return (
            f"not launched: micro_batch_size {_micro(witness)} ran out of memory with "
            f"{_described(witness)} (run {witness.run_id}), and {_micro(spec)} is larger; "
            "launcher.skip_unfit=false launches it"
        )

    def _unfit(self, spec: RunSpec) -> str | None:
        """Say that a run's tensors alone take more than there is; None where they may fit."""
        said = self._predictions.get(spec.run_id, {}).get("peak_allocated_gib")
        room = room_gib(spec, self._machine)
        if said is None or room is None or said["low"] <= room:
            return None
        return (
            f"not launched: its tensors are predicted to take {said['value']:.4g} GiB on each "
            f"device ({said['method']}), and there are {room:.4g}; "
            "launcher.skip_unfit=false launches it"
        )

    def begun(self, spec: RunSpec) -> None:
        """Take back what a run told: it is tried again."""
        self._witnesses[_memory_key(spec)].pop(spec.run_id, None)

    def ended(self, spec: RunSpec) -> None:
        """Look at what the end of a run tells, whoever launched it."""
        self.begun(spec)
        if self._witness_in(self._sweep.run(spec.run_id)) is not None:
            self._witnesses[_memory_key(spec)][spec.run_id] = spec

    def _witness_in(self, folder: RunFolder) -> RunSpec | None:
        """Return the run of a folder if it is a witness; a damaged one tells nothing."""
        try:
            if not folder.status.exists():
                return None
            status = RunStatus.read(folder.status)
            if status.status is not Status.OOM:
                return None
            spec, launch = RunSpec.read(folder.config), read_json(folder.launch)
        except (BatchscapeError, OSError):
            return None
        told = _by_an_allocator(status) or spec.device_type == "cpu"
        is_memory = status.cause in {None, Cause.OUT_OF_MEMORY}
        alike = ran_on(self._machine, spec, launch) and _had_its_device(spec, launch)
        return spec if told and is_memory and alike else None


def reject(folder: RunFolder, reason: str) -> RunStatus:
    """Write that a run was not launched because it cannot fit.

    Parameters
    ----------
    folder : RunFolder
        With a status of a run that was never begun.
    reason : str

    Returns
    -------
    RunStatus
    """
    status = RunStatus(Status.REJECTED, reason=reason, cause=Cause.OUT_OF_MEMORY)
    status.write(folder.status)
    return status


def _by_an_allocator(status: RunStatus) -> bool:
    """Whether a rank said so itself; a process that was killed says nothing."""
    return status.phase is not None or status.cause is None


def _had_its_device(spec: RunSpec, launch: dict[str, Any]) -> bool:
    """Whether nobody else took of the memory that ran out."""
    if spec.config.device.memory_limit_gib is not None:
        return True
    others = OTHER_LAUNCHER in (launch.get("timing_invalid_reason") or "")
    if spec.device_type == "cuda":
        # Other launchers are kept off a device.
        return bool(launch.get("runs_per_device", 1) == 1)
    return launch.get("concurrent_runs", 1) == 1 and not others


def ran_on(machine: Machine, spec: RunSpec, launch: dict[str, Any]) -> bool:
    """Whether a run was on devices like those that this machine gives to every run."""
    if spec.device_type == "cpu":
        return bool(launch.get("device_model") == machine.cpu_name)
    names = {device.name for device in machine.cuda_devices}
    devices = min(spec.geometry.data_parallel_size, len(machine.cuda_devices))
    return names == {launch.get("device_model")} and len(launch.get("devices", ())) == devices


def _memory_key(spec: RunSpec) -> str:
    """Return all that decides memory, but for micro-batch and accumulation."""
    kept = that_affect(spec.config, Affects.MEMORY)
    # The geometry, and the type of the device.
    del kept["batch"], kept["launcher"]
    resolved = {
        "nodes": spec.geometry.nodes,
        "data_parallel_size": spec.geometry.data_parallel_size,
        "device_type": spec.device_type,
        "precision": spec.precision,
        "data": spec.data.manifest_hash,
        "source": spec.source_hash,
    }
    return json.dumps([kept, resolved], sort_keys=True)


def _needs_more(spec: RunSpec, witness: RunSpec) -> bool:
    """Whether a run takes more memory than a witness, in some stage than in each of its stages."""
    ours = [stage.geometry for stage in spec.stages]
    theirs = [stage.geometry for stage in witness.stages]
    return all(
        any(
            our.micro_batch_size > their.micro_batch_size
            and (our.gradient_accumulation_steps > 1 or their.gradient_accumulation_steps == 1)
            for our in ours
        )
        for their in theirs
    )


def _micro(spec: RunSpec) -> int:
    """The largest micro-batch of a run; one with a ramp may have several."""
    return max(stage.geometry.micro_batch_size for stage in spec.stages)


def _described(witness: RunSpec) -> str:
    ranks = witness.geometry.data_parallel_size
    limit = witness.config.device.memory_limit_gib
    of = "" if limit is None else f" of {limit:g} GiB each"
    return f"all else alike on {ranks} {'device' if ranks == 1 else 'devices'}{of}"
