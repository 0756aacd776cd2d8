"""The whole life of a run of a user's own program: started, watched, read, and judged.

One process does it, in the place of the ranks of a run of ours. It leaves the same rows and the
same outcome as rank 0 of those would.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from batchscape.config import Command
from batchscape.errors import BatchscapeError, DamageError, DiskError, RecordError
from batchscape.measure.contention import TreeWaits
from batchscape.outgoing import redact
from batchscape.programs.agreement import compare_batch, why_late, why_unfinished
from batchscape.programs.endings import EXIT_ADVICE, Ending, ending
from batchscape.programs.metrics import Log, open_reader
from batchscape.programs.program import Program, ProgramEnd, command_line
from batchscape.programs.rows import RowWriter, diverged_at, rank_rows
from batchscape.programs.tree import TreeMemory, driver_memory
from batchscape.record.disk import as_disk_error, is_fault_of_the_machine
from batchscape.record.files import JsonLines, read_json, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.heartbeat import Phase, beat
from batchscape.record.spec import RunSpec
from batchscape.record.status import Cause, Outcome, Status, StopReason

_POLL_S = 0.1
_STOP_GRACE_S = 15.0
"""Time for the program between SIGTERM and SIGKILL, when the run is to stop. The launcher kills
this process a little later."""
_READ_SHARE = 0.01
"""Share of the time that reading the metrics of a running program may take."""
_READ_AFTER_S = 1.0
_IDLE_END_S = 60.0
"""Silence after the last optimizer step that is an end, where the processes do nothing; less where
`launcher.hang_s` is less."""
_IDLE_SHARE = 0.05
"""Share of the cores of the training that processes which do nothing are on: they poll."""
_LEAST_CORES = 0.05
"""Cores that a training is on at least. One that takes less trains elsewhere, as in a container."""


def main(run_dir: str, rank: int) -> int:
    """Run the program of the run in `run_dir`."""
    folder = RunFolder(Path(run_dir))
    supervision: Supervision | None = None
    try:
        supervision = Supervision(folder)
        signal.signal(signal.SIGTERM, supervision.request_stop)
        status, cause, reason = supervision.run()
    except Exception as error:  # noqa: BLE001  (a run ends with a status, whatever happened)
        status, cause, reason = _failure(error, folder)
    Outcome(
        status,
        optimizer_step=0 if supervision is None else supervision.optimizer_step,
        stop_reason=StopReason.BUDGET if status is Status.COMPLETED else None,
        reason=reason,
        cause=cause,
    ).write(folder, rank)
    return 0 if status in {Status.COMPLETED, Status.DIVERGED} else 1


def _failure(error: Exception, folder: RunFolder) -> Ending:
    """Return the ending of a run that an error of this process causes."""
    user_error = error if isinstance(error, BatchscapeError) else as_disk_error(error, folder.path)
    if isinstance(user_error, DiskError):
        return Ending(Status.INTERRUPTED, Cause.DISK, str(user_error))
    if isinstance(user_error, BatchscapeError):
        return Ending(Status.FAILED, Cause.EXCEPTION, str(user_error))
    with contextlib.suppress(OSError):  # the log may be on a full disk
        sys.stderr.write(redact("".join(traceback.format_exception(error))))
    cause = Cause.INFRASTRUCTURE if is_fault_of_the_machine(error) else Cause.EXCEPTION
    return Ending(Status.FAILED, cause, f"{type(error).__name__}: {error}".splitlines()[0])


class Supervision:
    """One attempt at a run of a program."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._spec = spec = RunSpec.read(folder.config)
        self._launch = read_json(folder.launch)
        if not isinstance(spec.config.engine, Command):
            raise AssertionError(spec.config.engine)
        self._command = spec.config.engine
        self._attempt: int = self._launch["attempt"]
        self._log_offset = folder.log.stat().st_size if folder.log.exists() else 0
        self._stop = False
        self._diverged: str | None = None
        self._read_at = 0.0
        self._log = Log()
        self._sizes_seen = 0, 0, 0
        self._began_s = self._grew_at_s = time.monotonic()
        self._idle_s: float | None = None
        """How long the program had done nothing after its last optimizer step when it was ended."""
        self._goes_on = self._command.resumable and self._attempt > 0
        self._steps_before: int | None = None if self._goes_on else 0

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps that the program has logged."""
        return int(self._log.steps[-1]["optimizer_step"]) if self._log.steps else 0

    def request_stop(self, *_: object) -> None:
        """Ask the program to end, at the next look."""
        self._stop = True

    def run(self) -> Ending:
        """Start the program, wait for its end, record it; return how the run ended."""
        folder, spec, goes_on = self._folder, self._spec, self._goes_on
        if not goes_on:
            shutil.rmtree(folder.program, ignore_errors=True)
        folder.program.mkdir(parents=True, exist_ok=True)
        argv, cwd, environment = command_line(spec, self._command, folder, self._attempt)
        self._description = {
            "argv": argv,
            "cwd": str(cwd.absolute()),
            "metrics": asdict(self._command.metrics),
        }
        write_json(folder.command, self._description)
        self._rows = RowWriter(folder, spec, self._attempt, goes_on=goes_on)
        self._reader = open_reader(
            self._command.metrics,
            folder.program,
            spec.geometry,
            spec.config.sequence_length,
            printed=folder.log,
            printed_before=0 if goes_on else self._log_offset,
        )
        program = Program(argv, cwd, environment)
        driver = driver_memory() if self._launch["device_type"] == "cuda" else None
        self._memory = TreeMemory(program.guard_pid, driver)
        self._rows.waits = self._waits = TreeWaits(program.guard_pid)
        try:
            program_end = self._watch(program)
        finally:
            program.close()
        if program_end.processes_left:
            sys.stdout.write(
                f"batchscape: killed {program_end.processes_left} processes that the program left\n"
            )
        return self._conclude(program_end)

    def _watch(self, program: Program) -> ProgramEnd:
        """Look at the program until it has ended."""
        has_asked_to_end = False
        kill_at_s = math.inf
        while (program_end := program.wait(_POLL_S)) is None:
            if self._spec.config.measure.memory:
                self._memory.look()
            self._waits.look()
            self._read()
            self._beat()
            if not has_asked_to_end:
                self._idle_s = self._idle_at_the_end()
                if self._stop or self._diverged is not None or self._idle_s is not None:
                    has_asked_to_end = True
                    program.ask_to_end()
                    kill_at_s = time.monotonic() + _STOP_GRACE_S
            if time.monotonic() >= kill_at_s:
                kill_at_s = math.inf
                program.kill()
        return program_end

    def _beat(self) -> None:
        """Tell the launcher that the program is alive, if its log or its metrics have grown."""
        with contextlib.suppress(OSError):
            printed = self._folder.log.stat().st_size
            sizes = printed, len(self._log.steps), len(self._log.evals)
            if sizes != self._sizes_seen:
                self._sizes_seen, self._grew_at_s = sizes, time.monotonic()
                step = self.optimizer_step
                if self._steps_before is None:
                    self._steps_before = step
                beat(Phase.RECORD, step, steps_done=max(0, step - self._steps_before))

    def _idle_at_the_end(self) -> float | None:
        """Return how long a program that is trained has been idle; None where it works.

        Neither its log nor its metrics have grown, and its processes are on a small share of the
        cores that they were on before.
        """
        least_s = self._spec.config.launcher.hang_s
        now_s = time.monotonic()
        limit_s = _IDLE_END_S if least_s is None else min(_IDLE_END_S, least_s)
        if least_s is None or now_s - self._grew_at_s < limit_s:
            return None
        cores = self._waits.processors_since(0.0)
        idle_cores = self._waits.processors_since(now_s - limit_s)
        if cores is None or idle_cores is None or why_unfinished(self._spec, self._log.steps):
            return None
        trained_cores = cores * (now_s - self._began_s) / (self._grew_at_s - self._began_s)
        if trained_cores < _LEAST_CORES or idle_cores > _IDLE_SHARE * trained_cores:
            return None
        return limit_s

    def _read(self) -> None:
        """Read what the program has logged by now, if that is due."""
        if time.monotonic() < self._read_at:
            return
        cpu_before_s = time.thread_time()
        try:
            self._log = self._reader.read()
            self._rows.write(self._log)
            self._diverged = diverged_at(self._log)
        except RecordError:
            pass  # perhaps half written; an error that lasts is reported at the end
        took_s = time.thread_time() - cpu_before_s
        self._read_at = time.monotonic() + max(_READ_AFTER_S, took_s / _READ_SHARE)

    def _conclude(self, program_end: ProgramEnd) -> Ending:
        """Record what the program did, and judge it."""
        read_error: BatchscapeError | None = None
        try:
            is_whole = program_end.code == 0 or self._idle_s is not None
            self._log = self._reader.read(final=is_whole and not self._stop)
        except BatchscapeError as error:
            read_error = error
        log, memory = self._log, self._memory
        observed, batch_problems = compare_batch(self._spec, log, memory.world_size)
        self._rows.write(log)
        if self._spec.config.measure.memory:
            lines = JsonLines(self._folder.lines("ranks"))
            lines.append(rank_rows(memory.ranks, self._launch, memory.foreign_processes))
            lines.close()
        write_json(
            self._folder.command,
            {
                **self._description,
                "exit_code": program_end.code,
                "processes_killed": program_end.processes_left,
                "observed": observed,
                "sources": log.sources,
                "problems": batch_problems,
            },
        )
        verdict = self._judge(program_end, read_error, batch_problems)
        if batch_problems:
            # They are of another batch than their columns say.
            self._rows.write(Log())
        if verdict.status is Status.OOM and memory.foreign_processes:
            reason = (
                f"{verdict.reason}; processes of others held memory of its devices, so that it "
                "says nothing of what the program takes"
            )
            return Ending(Status.FAILED, Cause.OTHER_MEMORY, reason)
        return verdict

    def _judge(
        self,
        program_end: ProgramEnd,
        read_error: BatchscapeError | None,
        batch_problems: list[str],
    ) -> Ending:
        """Return the ending of the run; the gravest problem decides."""
        log, divergence = self._log, diverged_at(self._log)
        shortfall = why_unfinished(self._spec, log.steps)
        failure = ending(
            program_end.code, self._folder.log, self._log_offset, is_trained=shortfall is None
        )
        remarks = (log.sources.get(name) for name in ("optimizer_step", "eval_loss"))
        notes = [note for note in (why_late(log.steps), *remarks) if note is not None]
        if self._idle_s is not None and shortfall is None:
            failure = None
            notes.append(
                f"the program did nothing for {self._idle_s:g} s after its last optimizer step, "
                f"and was ended; what helps: {EXIT_ADVICE}"
            )
        if self._stop and (shortfall is not None or failure is not None):
            return Ending(Status.INTERRUPTED, Cause.INTERRUPTED, "the program was asked to end")
        if batch_problems:
            problems = batch_problems if failure is None else [*batch_problems, str(failure.reason)]
            return Ending(Status.FAILED, Cause.CONTRADICTION, "; ".join(problems))
        if divergence is not None:
            return Ending(Status.DIVERGED, Cause.DIVERGENCE, divergence)
        if failure is not None:
            return failure
        if read_error is not None:
            is_damaged = isinstance(read_error, DamageError)
            cause = Cause.DAMAGED_RECORDS if is_damaged else Cause.CONTRADICTION
            return Ending(
                Status.FAILED, cause, f"the program's metrics cannot be read: {read_error}"
            )
        return Ending(
            Status.COMPLETED if shortfall is None else Status.FAILED,
            None if shortfall is None else Cause.CONTRADICTION,
            "; ".join(filter(None, [shortfall, *notes])) or None,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
