"""Which run of a launch starts next, on which devices of this machine, and how long all will take.

Runs that go one at a time keep the order of the launch: their times are compared, and a drift of
the machine must fall equally on all. Where several go at once no time is compared, and the run that
should take longest starts first; a run whose time is unknown starts before it. The queue is strict:
no run starts before its head.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from batchscape.config import Local
from batchscape.launch.attempt import ActiveRun
from batchscape.launch.devices import DevicePool, Lease
from batchscape.launch.predictions import Predictions
from batchscape.launch.schedule import makespan_s
from batchscape.plan.machine import Machine
from batchscape.record.overview import remaining_s
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus
from batchscape.train.timeline import Timeline

_PAUSE_S = 1.0
"""While another launcher waits for devices, no run starts for this long after a run's end: the
other launcher looks for free devices twice in this time."""


class Placement:
    """Leases devices to runs, one after the other; the caller starts or releases each.

    Parameters
    ----------
    spec : RunSpec
        One of the runs of the launch, which share its launcher and type of devices. The plan has
        rejected runs with more ranks than may share these devices.
    machine : Machine
    predictions : dict of str to mapping
        Content of `prediction.json`, by run; the caller may add runs to it.
    warn : callable
        Takes the warning that devices cannot be locked.
    own_share : callable, optional
        Share of its optimizer steps that a run trains itself.
    """

    def __init__(
        self,
        spec: RunSpec,
        machine: Machine,
        predictions: Predictions,
        warn: Callable[[str], None],
        *,
        own_share: Callable[[RunSpec], float] = lambda _: 1.0,
    ) -> None:
        launcher, device_type = spec.config.launcher, spec.device_type
        if device_type == "cpu":
            names = {core: str(core) for core in machine.core_numbers}
            self._noun = "cores"
        else:
            names = {device.index: device.uuid for device in machine.cuda_devices}
            self._noun = "CUDA devices"
        self._launcher = launcher
        # The devices of an allocation belong to its job.
        is_local = isinstance(launcher, Local)
        self._pool = DevicePool(
            device_type,
            names,
            warn,
            runs_per_device=launcher.runs_per_device,
            is_needed=is_local,
        )
        self._leases: dict[str, Lease] = {}
        self.waiting: RunSpec | None = None
        """The run at the head of the queue, for which there is no room."""
        self._paused_until_s = -math.inf
        self._predictions, self._own_share = predictions, own_share
        self._sealed_s = self._sealed_samples = 0.0
        """Sums over the sealed runs of the sweep."""
        self._times_by_method: dict[str, tuple[float, float]] = {}
        """Sums of measured and of predicted times of the sealed runs, by method of prediction."""

    def next(self, queue: deque[RunSpec]) -> tuple[RunSpec, Lease] | None:
        """Take the next run out of the queue, and lease its devices.

        Parameters
        ----------
        queue : deque of RunSpec
            In the order of the launch.

        Returns
        -------
        spec : RunSpec
        lease : Lease
            None instead of both where no run can start before one ends, here or elsewhere.
        """
        if not queue or len(self._leases) >= self._launcher.concurrent_runs:
            self.close()
            return None
        self._pool.show_waiting(False)
        if time.monotonic() < self._paused_until_s and self._pool.others_wait():
            return None
        spec = min(queue, key=self._sort_key) if self._launcher.concurrent_runs > 1 else queue[0]
        lease = self._pool.lease(spec.geometry.data_parallel_size)
        self.waiting = spec if lease is None else None
        self._pool.show_waiting(self._pool.waits_for_others)
        if lease is None:
            return None
        self._leases[spec.run_id] = lease
        queue.remove(spec)
        return spec, lease

    def left_s(self, active: Mapping[str, ActiveRun], queue: Iterable[RunSpec]) -> float:
        """Return the time until the last run ends, in seconds; NaN where it is not known."""
        is_ordered = self._launcher.concurrent_runs == 1
        times = []
        for run in active.values():
            left_s = remaining_s(run.last_row, run.spec.optimizer_steps)
            if left_s is None:
                left_s = self.expected_s(run.spec) - (time.monotonic() - run.began_at)
            times.append((run.spec, left_s))
        specs = list(queue) if is_ordered else sorted(queue, key=self._sort_key)
        times += [(spec, self.expected_s(spec)) for spec in specs]
        if any(math.isnan(seconds) for _, seconds in times):
            return math.nan
        return makespan_s(
            [(spec.geometry.data_parallel_size, max(0.0, seconds)) for spec, seconds in times],
            len(self._pool.names),
            self._launcher.concurrent_runs,
            self._launcher.runs_per_device,
        )

    def expected_s(self, spec: RunSpec) -> float:
        """Return the expected time of a whole run, in seconds; NaN where it is not known.

        It is the predicted time, multiplied by the ratio of measured to predicted time of the
        sealed runs that were predicted by the same method. Where there is no prediction, it is the
        time per sample of the sealed runs, multiplied by the samples of the run.
        """
        predicted = self._predicted(spec)
        if predicted is None:
            if not self._sealed_samples:
                return math.nan
            own_samples = spec.trained_samples * self._own_share(spec)
            return self._sealed_s / self._sealed_samples * own_samples
        method, predicted_s = predicted
        measured_sum_s, predicted_sum_s = self._times_by_method.get(method, (1.0, 1.0))
        return predicted_s * self._own_share(spec) * measured_sum_s / predicted_sum_s

    def _predicted(self, spec: RunSpec) -> tuple[str, float] | None:
        """Return method and value of the predicted time of a whole run, in seconds."""
        time_s = self._predictions.get(spec.run_id, {}).get("run_time_s")
        return (time_s["method"], time_s["value"]) if time_s and time_s["value"] else None

    def _sort_key(self, spec: RunSpec) -> float:
        """Sort runs of unknown time first, then the longest."""
        expected_s = self.expected_s(spec)
        return -math.inf if math.isnan(expected_s) else -expected_s

    @property
    def why_waiting(self) -> str | None:
        """Why no run starts, where other launchers are the reason."""
        if self.waiting is None or not self._pool.waits_for_others:
            return None
        return (
            f"Waiting for {self._noun} that another launcher holds (`lslocks` shows who locks "
            f"files in {self._pool.folder})"
        )

    def release(self, spec: RunSpec) -> None:
        """Take back the devices of a run that has ended, or that did not start."""
        self._paused_until_s = time.monotonic() + _PAUSE_S
        self._pool.release(self._leases.pop(spec.run_id))

    def close(self) -> None:
        """Give other launchers the devices that no run is on, and wait for none."""
        self.waiting = None
        self._pool.close()

    def learn(self, spec: RunSpec, status: RunStatus) -> None:
        """Note the time that a sealed run took, in all its attempts."""
        if not status.status.is_sealed or not (samples := status.summary.get("samples")):
            return
        # What it trained itself, where it began from the state of another run.
        samples -= Timeline(spec.stages).samples_before(status.attempts[0].from_optimizer_step)
        spans = [(a.started_at, a.ended_at) for a in status.attempts]
        measured_s = sum(max(0.0, end - start) for start, end in spans if end is not None)
        self._sealed_s += measured_s
        self._sealed_samples += samples
        if (predicted := self._predicted(spec)) is not None:
            method, predicted_s = predicted
            measured_sum_s, predicted_sum_s = self._times_by_method.get(method, (0.0, 0.0))
            predicted_sum_s += predicted_s * samples / spec.trained_samples
            self._times_by_method[method] = measured_sum_s + measured_s, predicted_sum_s
