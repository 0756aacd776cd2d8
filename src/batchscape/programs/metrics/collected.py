"""Rows from logs whose columns the user names: JSON lines and printed text."""

from __future__ import annotations

from collections.abc import Mapping

from batchscape.config.metrics import (
    EVALUATION_COLUMNS,
    GEOMETRY_NAMES,
    STEP_COLUMNS,
    JsonlMetrics,
    RegexMetrics,
)
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.finish import finish, settle_loss
from batchscape.programs.metrics.inference import Batch
from batchscape.programs.metrics.log import Log
from batchscape.programs.metrics.numbers import as_count, as_row
from batchscape.programs.metrics.rows import Rows

__all__ = ["Collected"]


class Collected:
    """What was read so far, in our columns.

    Parameters
    ----------
    config : JsonlMetrics or RegexMetrics
    source : str
        Name of the file.
    may_go_back : bool
        Whether a later start of the program may repeat steps.
    """

    def __init__(
        self, config: JsonlMetrics | RegexMetrics, source: str, *, may_go_back: bool
    ) -> None:
        self._config = config
        self._source = source
        self._steps = Rows(source, may_go_back=may_go_back)
        self._evals = Rows(source, may_go_back=may_go_back)
        self._geometry: dict[str, list[int]] = {}
        self.seen: set[str] = set()

    def begin_start(self) -> None:
        """Take what follows for that of one start of the program."""
        self._steps.begin_start()
        self._evals.begin_start()

    def take(self, values: Mapping[str, object], tables: tuple[str, ...], where: str) -> None:
        """Add what one line says.

        Parameters
        ----------
        values : mapping
            As the program wrote them, by our names.
        tables : tuple of str
            Which of `steps` and `evals` the line is about.
        where : str
            Begins a message.

        Raises
        ------
        RecordError
            If a value is no number, or the step is missing, repeats or goes back.
        """
        self.seen |= values.keys()
        for name in GEOMETRY_NAMES:
            if name in values:
                count = as_count(values[name], f"{where}: {name}")
                known = self._geometry.setdefault(name, [])
                if count not in known:
                    known.append(count)
        for table in tables:
            columns = STEP_COLUMNS if table == "steps" else EVALUATION_COLUMNS
            chosen = {name: values[name] for name in columns if name in values}
            if "optimizer_step" not in chosen:
                msg = f"{where} has {', '.join(sorted(chosen))}, but no optimizer_step"
                raise RecordError(msg)
            row = as_row(chosen, self._config.units, where)
            if table == "steps":
                row["optimizer_step"] += 1 - self._config.first_step
                self._steps.add(row, least=1)
            else:
                row["optimizer_step"] -= self._config.initial_step
                self._evals.add(row, least=0)

    def log(self, geometry: BatchGeometry, sequence_length: int | None) -> Log:
        """Return everything, with the batch that follows from it."""
        steps, evals, batch = self._steps.get(), self._evals.get(), Batch()
        for name, counts in self._geometry.items():
            for count in counts:
                batch.put(name, count, self._source)
        sources: dict[str, str] = {}
        if missing := settle_loss(steps, self._config.loss_of, batch, geometry):
            sources["loss"] = missing
        if any("step_time_s" in row for row in steps):
            sources["step_time_s"] = f"as {self._source} has it"
        return finish(
            steps,
            evals,
            batch,
            geometry=geometry,
            sequence_length=sequence_length,
            sources=sources,
            source=self._source,
        )
