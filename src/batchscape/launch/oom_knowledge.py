"""Which runs are not launched, as they cannot fit.

A run whose tensors alone are predicted to take more than there is: `plan.room`.

And a run with a larger micro-batch than one that ran out of memory, with the same settings on the
same device, by the word of the allocator (on a CPU also of the cgroup), where nobody shared that
device. One of the same micro-batch (another seed, say) is still run: the other may have been just
too large. Neither does a run that accumulates say anything of one that does not, however large:
gradients that are kept between micro-steps take memory too, as much as a whole model with some
engines.

Where the memory that ran out is not that of the training (an evaluation's, the host's of a
device, or of a device that others share), the run is no `oom` in the first place:
`train.failures`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchscape.config import Affects, that_affect
from batchscape.errors import BatchscapeError
from batchscape.launch.attempts import OTHER_LAUNCHER
from batchscape.plan.room import room_gib, why_too_large
from batchscape.record.causes import Cause
from batchscape.record.disk import read_each
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.text import count_text

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine


class OomKnowledge:
    """What is known of the memory of the runs of one sweep folder, on one machine.

    Parameters
    ----------
    queue : sequence of RunSpec
        Runs to launch. One among them that ran out of memory before tells nothing until it has
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
        self._ran_out: defaultdict[str, list[RunSpec]] = defaultdict(list)
        queued = {spec.run_id for spec in queue}
        folders = [run for run in sweep.run_folders() if run.path.name not in queued]
        for spec in read_each(self._out_of_memory, folders, sweep.path):
            if spec is not None:
                self._ran_out[_memory_key(spec)].append(spec)

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
        if RunStatus.read(self._sweep.run(spec.run_id).status).attempts:
            return None
        peak = self._predictions.get(spec.run_id, {}).get("peak_allocated_gib", {})
        reason = why_too_large(spec, peak.get("low"), room_gib(spec, self._machine))
        if reason is not None:
            return f"not launched: {reason}"
        ran_out = self._ran_out.get(_memory_key(spec), ())
        smaller = [other for other in ran_out if _needs_more(spec, other)]
        if not smaller:
            return None
        other = min(smaller, key=lambda run: (_micro(run), run.run_id))
        return (
            f"not launched: micro_batch_size {_micro(other)} ran out of memory with "
            f"{_described(other)} (run {other.run_id}), and {_micro(spec)} is larger; "
            "launcher.skip_unfit=false launches it"
        )

    def ended(self, spec: RunSpec) -> None:
        """Look at what the end of a run tells, whoever launched it."""
        if self._out_of_memory(self._sweep.run(spec.run_id)) is not None:
            self._ran_out[_memory_key(spec)].append(spec)

    def _out_of_memory(self, folder: RunFolder) -> RunSpec | None:
        """Return the run of a folder if its memory was out; a damaged one tells nothing."""
        try:
            status = RunStatus.read(folder.status)
            if status.status is not Status.OOM:
                return None
            spec, launch = RunSpec.read(folder.config), read_json(folder.launch)
        except (BatchscapeError, OSError):
            return None
        # Without a phase no rank has said so, but the system: of the memory of the host.
        is_told = status.phase is not None or spec.device_type == "cpu"
        is_like = ran_on(self._machine, spec, launch) and _had_its_device(spec, launch)
        return spec if is_told and is_like else None


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


def _had_its_device(spec: RunSpec, launch: dict[str, Any]) -> bool:
    """Whether nobody else took of the memory that ran out."""
    if spec.config.device.memory_limit_gib is not None:
        return True
    if spec.device_type == "cuda":
        # Other launchers are kept off a device. Of processes that are not ours `train.failures` has
        # asked the driver.
        return bool(launch.get("runs_per_device") == 1)
    others = OTHER_LAUNCHER in (launch.get("timing_invalid_reason") or "")
    return launch.get("concurrent_runs") == 1 and not others


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


def _needs_more(spec: RunSpec, other: RunSpec) -> bool:
    """Whether a run takes more memory than another, in some stage than in each of its stages."""
    ours = [stage.geometry for stage in spec.stages]
    theirs = [stage.geometry for stage in other.stages]
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


def _described(spec: RunSpec) -> str:
    ranks = spec.geometry.data_parallel_size
    limit = spec.config.device.memory_limit_gib
    of = "" if limit is None else f" of {limit:g} GiB each"
    return f"all else alike on {count_text(ranks, 'device')}{of}"
