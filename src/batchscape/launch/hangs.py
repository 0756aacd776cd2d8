"""Whether a run hangs, by the heartbeats of its ranks and the launcher's own clock.

The rule: a run hangs when none of its ranks has had a heartbeat for

* `max(hang_s, 20 x step time)` while all of them are within optimizer steps, where
  the step time is the mean of this attempt so far (evaluations and checkpoints included, which
  makes it longer);
* `6 x hang_s`, or the above if that is longer, while any of them is elsewhere: at its start, in
  its first step, in a compilation, an evaluation or a checkpoint.

Every micro-step and every batch of an evaluation is a heartbeat of a rank (`record.heartbeat`). A
rank that waits for the others is silent as long as they are, so all must be silent; the message
names the rank that is behind. In a run over nodes only the ranks of the first node are watched, and
no rank is named. The heartbeats of a program (`engine=command`) are its log and its metrics: the
rule applies once those show its steps, with the longer time. Once it is trained, its own watcher
(`programs.worker`) ends it where its processes idle.

A launcher that was itself stopped for a while has not watched: a late look counts for no more than
a few seconds.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

from batchscape.record.heartbeat import Heartbeat, Phase, beats_path, stacks_path
from batchscape.record.spec import RunSpec
from batchscape.record.status import Cause, Status, Stop
from batchscape.text import list_text

HANG_STEPS = 20.0
"""A run hangs once a micro-step takes this many mean optimizer steps."""

_LONGEST_LOOK_S = 5.0
"""Longest time between two looks that the rule counts."""
_WITHIN_STEPS = {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.RECORD}


class HangWatch:
    """Heartbeats of the ranks of one attempt.

    Parameters
    ----------
    prefix : str
        Prefix of the paths of the shared files.
    spec : RunSpec
        Of the run; its processes on the first node are watched.

    Raises
    ------
    OSError
        If the shared files cannot be made.
    """

    def __init__(self, prefix: str, spec: RunSpec) -> None:
        self._prefix, self._spec = prefix, spec
        ranks = min(spec.processes, spec.geometry.devices_per_node)
        self._has_others = ranks < spec.processes
        self._hearts = [Heartbeat(beats_path(prefix, r), create=True) for r in range(ranks)]
        self._beats = [heart.read() for heart in self._hearts]
        self._looked_at = math.inf
        self._watched_s = self._silent_s = 0.0
        self._first_steps = 0, 0.0
        """Optimizer steps done when the first were seen, and the seconds watched until then."""
        self._step_time_s: float | None = None

    def look(self, now: float) -> Stop | None:
        """Look at all heartbeats.

        Parameters
        ----------
        now : float
            On a clock that only goes forward, in seconds.

        Returns
        -------
        Stop or None
            The end of a run that hangs, with the rank that is behind the others, where it is one;
            None while the run may well be alive.
        """
        elapsed_s = min(max(0.0, now - self._looked_at), _LONGEST_LOOK_S)
        self._looked_at = now
        self._watched_s += elapsed_s
        self._silent_s += elapsed_s
        beats = [heart.read() for heart in self._hearts]
        if beats != self._beats:
            self._beats, self._silent_s = beats, 0.0
            done = max(beat.steps_done for beat in beats)
            first, since_s = self._first_steps
            if done > first:
                # The first time includes the start and is too long, which is on the safe side.
                self._step_time_s = (self._watched_s - since_s) / (done - first)
                if first == 0:
                    self._first_steps = done, self._watched_s
        limit_s, rule = self._limit()
        if limit_s is None or self._silent_s < limit_s:
            return None
        return self._describe(limit_s, rule)

    def last_phase(self, rank: int) -> str | None:
        """Return the phase of the last heartbeat of a rank; None if it had none."""
        beats = [heart.read() for heart in self._hearts[rank : rank + 1]]
        return next((str(beat.phase) for beat in beats if beat.beats), None)

    def write_stacks(self, log: Path) -> None:
        """Append the stacks that the ranks have dumped to the log of the run."""
        with suppress(OSError), log.open("ab") as file:
            for rank, beat in enumerate(self._beats):
                path = stacks_path(self._prefix, rank)
                if path.exists() and (dumped := path.read_bytes()):
                    title = f"batchscape: stack of rank {rank}, which is in {beat}:\n"
                    file.write(title.encode() + dumped)

    def close(self) -> None:
        """Remove what was shared."""
        for rank, heart in enumerate(self._hearts):
            heart.close()
            for path in (beats_path(self._prefix, rank), stacks_path(self._prefix, rank)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _limit(self) -> tuple[float | None, str]:
        """Return how long the ranks may be silent now, and the rule in words."""
        launcher, step_s = self._spec.config.launcher, self._step_time_s
        least_s, outside_s = launcher.hang_s, launcher.hang_outside_s
        if least_s is None or outside_s is None or (step_s is None and self._spec.is_program):
            return None, ""
        rule = f"hang_s = {least_s:g} s"
        is_within_steps = all(beat.phase in _WITHIN_STEPS for beat in self._beats)
        if step_s is None or self._spec.is_program or not is_within_steps:
            least_s, rule = outside_s, f"6 x hang_s = {outside_s:g} s"
        if step_s is None:
            return least_s, rule
        rule = f"{HANG_STEPS:g} x step time {step_s:.3g} s, at least {rule}"
        return max(least_s, HANG_STEPS * step_s), rule

    def _describe(self, limit_s: float, rule: str) -> Stop:
        silence = f"no heartbeat for {limit_s:.4g} s ({rule})"
        rank = None
        if self._spec.is_program:
            done = self._beats[0].optimizer_step
            reason = f"the program hangs after optimizer step {done}: neither its log nor its "
            reason += f"metrics grew, {silence}"
        elif self._has_others:
            positions = ", ".join(sorted(set(map(str, self._beats))))
            reason = f"a rank hangs: {silence}; those of the first node are in {positions}"
        else:
            slowest = min(beat.pace for beat in self._beats)
            behind = [number for number, beat in enumerate(self._beats) if beat.pace == slowest]
            # The others wait for a rank that is behind.
            rank = behind[0] if len(behind) == 1 else None
            who = f"ranks {list_text(behind, 'and')} hang" if rank is None else f"rank {rank} hangs"
            reason = f"{who} in {self._beats[behind[0]]}: {silence}"
        return Stop(Status.FAILED, reason=reason, cause=Cause.HANG, rank=rank)
