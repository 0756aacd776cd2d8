"""Which runs are not launched, as they cannot fit.

A run is not launched where its tensors alone are predicted to take more memory than there is
(`plan.room`), or where a run with a smaller micro-batch and the same settings ran out of memory on
the same device. The allocator (on a CPU also the cgroup) must have said so, and no other process
may have shared the device. A run of the same micro-batch (with another seed) is launched: the other
may have been just too large. A run that accumulates is no evidence against one that does not:
gradients that are kept between micro-steps take memory too, with some engines as much as a whole
model.

Where the memory that ran out is not that of the training (an evaluation's, the host's of a device,
or of a device that others share), the run is no `oom`: `train.failures`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from batchscape.config import Affects, that_affect
from batchscape.errors import BatchscapeError
from batchscape.launch.devices import OTHER_LAUNCHER, LaunchRecord
from batchscape.launch.predictions import Predictions
from batchscape.plan.machine import Machine
from batchscape.plan.room import room_gib, why_too_large
from batchscape.record.disk import read_each
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.text import count_text


class OomKnowledge:
    """Runs of one sweep folder that ran out of memory on one machine, and what follows for others.

    Parameters
    ----------
    queue : sequence of RunSpec
        Runs to launch. Their earlier ends do not count; each counts once it has ended in this
        launch.
    sweep : SweepFolder
        Runs of earlier launches count.
    machine : Machine
        Runs that ran out of memory on other devices do not count.
    predictions : dict of str to mapping
        Content of `prediction.json`, by run.
    """

    def __init__(
        self,
        queue: Sequence[RunSpec],
        sweep: SweepFolder,
        machine: Machine,
        predictions: Predictions,
    ) -> None:
        self._sweep = sweep
        self._predictions = predictions
        self._machine = machine
        self._specs_out_of_memory: defaultdict[str, list[RunSpec]] = defaultdict(list)
        queued = {spec.run_id for spec in queue}
        folders = [run for run in sweep.run_folders() if run.path.name not in queued]
        for spec in read_each(self._spec_if_out_of_memory, folders, sweep.path):
            if spec is not None:
                self._specs_out_of_memory[_memory_key(spec)].append(spec)

    def refusal(self, spec: RunSpec) -> str | None:
        """Say why a run is not launched; None where it is.

        Parameters
        ----------
        spec : RunSpec
            A run that was begun before is launched: its own end says more than those of others.

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
        room = room_gib(spec, self._machine)
        if (reason := why_too_large(spec, peak.get("low"), room)) is not None:
            return f"not launched: {reason}"
        specs_out_of_memory = self._specs_out_of_memory[_memory_key(spec)]
        smaller_specs = [other for other in specs_out_of_memory if _needs_more(spec, other)]
        if not smaller_specs:
            return None
        other = min(smaller_specs, key=lambda run: (_largest_micro(run), run.run_id))
        limit = other.config.device.memory_limit_gib
        each = "" if limit is None else f" of {limit:g} GiB each"
        devices = count_text(other.geometry.data_parallel_size, "device") + each
        return (
            f"not launched: micro_batch_size {_largest_micro(other)} ran out of memory with "
            f"all else alike on {devices} (run {other.run_id}), and {_largest_micro(spec)} is "
            "larger; launcher.skip_unfit=false launches it"
        )

    def learn(self, spec: RunSpec) -> None:
        """Note whether a run that has ended ran out of memory, whoever launched it."""
        if self._spec_if_out_of_memory(self._sweep.run(spec.run_id)) is not None:
            self._specs_out_of_memory[_memory_key(spec)].append(spec)

    def _spec_if_out_of_memory(self, folder: RunFolder) -> RunSpec | None:
        """Return the spec of a run that ran out of memory; None where its folder is damaged."""
        try:
            status = RunStatus.read(folder.status)
            if status.status is not Status.OOM:
                return None
            spec, launch = RunSpec.read(folder.config), read_json(folder.launch)
        except (BatchscapeError, OSError):
            return None
        # Without a phase the system reported it, not a rank: the memory of the host was out.
        is_of_device = status.phase is not None or spec.device_type == "cpu"
        is_comparable = ran_on(self._machine, spec, launch) and _had_memory_alone(spec, launch)
        return spec if is_of_device and is_comparable else None


def _had_memory_alone(spec: RunSpec, launch: LaunchRecord) -> bool:
    """Whether the memory that ran out was the run's alone."""
    if spec.config.device.memory_limit_gib is not None:
        return True
    if spec.device_type == "cuda":
        # Locks keep other launchers off a device; `train.failures` has asked the driver about
        # other processes.
        return bool(launch.get("runs_per_device") == 1)
    had_other_launchers = OTHER_LAUNCHER in (launch.get("timing_invalid_reason") or "")
    return launch.get("concurrent_runs") == 1 and not had_other_launchers


def ran_on(machine: Machine, spec: RunSpec, launch: LaunchRecord) -> bool:
    """Whether a run was on devices like those that this machine gives to every run."""
    if spec.device_type == "cpu":
        return bool(launch.get("device_model") == machine.cpu_name)
    names = {device.name for device in machine.cuda_devices}
    devices = min(spec.geometry.data_parallel_size, len(machine.cuda_devices))
    return names == {launch.get("device_model")} and len(launch.get("devices", ())) == devices


def _memory_key(spec: RunSpec) -> str:
    """Return the settings that decide memory, without micro-batch and accumulation."""
    settings = that_affect(spec.config, Affects.MEMORY)
    del settings["batch"], settings["launcher"]
    resolved = {
        "nodes": spec.geometry.nodes,
        "data_parallel_size": spec.geometry.data_parallel_size,
        "device_type": spec.device_type,
        "precision": spec.precision,
        "data": spec.data.manifest_hash,
        "source": spec.source_hash,
    }
    return json.dumps([settings, resolved], sort_keys=True)


def _needs_more(spec: RunSpec, other: RunSpec) -> bool:
    """Whether every stage of `other` takes less memory than some stage of `spec`."""
    geometries = [stage.geometry for stage in spec.stages]
    other_geometries = [stage.geometry for stage in other.stages]
    return all(
        any(
            geometry.micro_batch_size > other_geometry.micro_batch_size
            and (
                geometry.gradient_accumulation_steps > 1
                or other_geometry.gradient_accumulation_steps == 1
            )
            for geometry in geometries
        )
        for other_geometry in other_geometries
    )


def _largest_micro(spec: RunSpec) -> int:
    """Return the largest micro-batch of a run; a run with a ramp may have several."""
    return max(stage.geometry.micro_batch_size for stage in spec.stages)
