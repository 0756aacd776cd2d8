"""The `trainer_state.json` of a Hugging Face `Trainer`.

What it holds was read in the source of transformers 5.23, `trainer.py`: a logged loss is the
mean over the steps since the last one logged, and over ranks; `train_batch_size` is a process's;
`num_input_tokens_seen` counts the inputs of all ranks; the last entry has samples and steps a
second, rounded to three digits. A checkpoint has one file of random states a process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchscape.config.metrics import TrainerStateMetrics
from batchscape.errors import RecordError
from batchscape.programs.metrics.log import Log, MetricRows, Reader, Row, settle_loss
from batchscape.programs.metrics.numbers import as_count, as_float, as_row, content_of

_FILE = "trainer_state.json"
_STEP = {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}
_EVALUATION = {"loss": "eval_loss", "accuracy": "eval_accuracy", "runtime": "evaluation_s"}
"""Behind the prefix of an evaluation set: `eval`, or `eval_<name>` of one of several."""


class TrainerStateReader(Reader):
    """Reads the state that the `Trainer` saved last."""

    source = _FILE

    _config: TrainerStateMetrics

    def read(self, *, final: bool = False) -> Log:
        """Return what the metrics hold by now; without a sequence length no tokens of rows."""
        log = super().read(final=final)
        if self._sequence_length is None:
            for row in log.steps:
                row.pop("tokens", None)
        return log

    def _read(self, *, final: bool) -> Log:
        paths = [self._path]
        if self._path.is_dir():
            paths = [self._path / _FILE, *sorted(self._path.glob(f"checkpoint-*/{_FILE}"))]
        latest: tuple[Path, dict[str, Any]] | None = None
        for path in paths:
            content = content_of(path)
            if not content:
                continue
            try:
                state = json.loads(content)
                state["global_step"] = as_count(state["global_step"], "global_step")
                if latest is None or state["global_step"] > latest[1]["global_step"]:
                    latest = path, state
            except (ValueError, LookupError, TypeError, RecordError) as error:
                # The Trainer may be in the midst of writing it.
                if final:
                    raise RecordError(f"{path} is no state of a Trainer: {error}") from None
        if latest is not None:
            return self._log(*latest)
        if final:
            raise RecordError(
                f"no {_FILE} in {self._path} or its checkpoints: call trainer.save_state() "
                f"after trainer.train(), or name the output folder in metrics.path"
            )
        return Log()

    def _log(self, path: Path, state: Mapping[str, Any]) -> Log:
        history = state.get("log_history") or []
        sources = {"loss": "mean over ranks of the means that the Trainer takes"}
        held_out = self._held_out(history, path, sources)
        is_best = state.get("best_model_checkpoint") is not None
        steps, evals = _rows(history, path, held_out, sources, best=is_best)
        for row in steps:
            # The Trainer logs 0 for a loss that is not a number (`logging_nan_inf_filter`).
            if "loss" in row and math.isnan(row.get("gradient_norm", 0.0)):
                if row["loss"] == 0:
                    row["loss"] = math.nan
                elif math.isfinite(row["loss"]):
                    del row["loss"]
        if missing := settle_loss(steps):
            sources["loss"] = f"{missing}; set logging_steps=1 to have it"
        if state["global_step"] > (steps[-1]["optimizer_step"] if steps else 0):
            steps.append({"optimizer_step": state["global_step"]})
        _time_steps(steps, evals, state)
        if self._sequence_length is None:
            sources["tokens"] = "missing: the Trainer counts inputs, padding perhaps included"
        return Log(steps, evals, _readings(state, history, path), [], sources)

    def _held_out(self, history: list[dict[str, Any]], path: Path, sources: dict[str, str]) -> str:
        """Return the key of the held-out loss; note where there are several."""
        keys = dict.fromkeys(
            key
            for entry in history
            for key in entry
            if re.fullmatch("eval_(.*_)?loss", key)
            # A metric may have such a name, too.
            if key == "eval_loss" or f"{key[:-5]}_runtime" in entry
        )
        chosen = self._config.eval_loss or "eval_loss"
        if not keys or any(chosen in entry for entry in history):
            return chosen
        if self._config.eval_loss is not None:
            raise RecordError(f"{path} has no {chosen}, but {', '.join(keys)}")
        if len(keys) > 1:
            sources["eval_loss"] = (
                f"there is no held-out loss: the Trainer has several, {', '.join(keys)}; say which "
                "with engine.metrics.eval_loss"
            )
            return chosen
        (only_key,) = keys
        sources["eval_loss"] = f"the held-out loss is {only_key}, of the only evaluation set"
        return only_key


def _rows(
    history: list[dict[str, Any]],
    path: Path,
    held_out: str,
    sources: dict[str, str],
    *,
    best: bool,
) -> tuple[list[Row], list[Row]]:
    steps, evals = MetricRows(str(path)), MetricRows(str(path))
    evaluated_s, last_step, has_trained = 0.0, -1, False
    columns = {held_out[:-4] + end: column for end, column in _EVALUATION.items()}
    for number, entry in enumerate(history):
        where = f"{path}, log_history[{number}]"
        has_trained |= "train_loss" in entry
        if row := _row(entry, "loss", _STEP, where):
            steps.add(row | _counts(entry, evaluated_s, where), least=1)
        # After the training the best model may be loaded, which is not that of the last step;
        # and a model that was evaluated may be evaluated once more.
        row = _row(entry, held_out, columns, where)
        if row and row["optimizer_step"] != last_step and not (has_trained and best):
            last_step = row["optimizer_step"]
            evals.add(row, least=0)
        evaluated_s += _evaluated_s(entry)
    if repeats := steps.repeats():
        sources["optimizer_step"] = repeats
    return steps.get(), evals.get()


def _readings(
    state: Mapping[str, Any], history: list[dict[str, Any]], path: Path
) -> dict[tuple[str, int], str]:
    """Return what a state tells of the batch."""
    readings = {}
    for folder in (path.parent, *sorted(path.parent.glob("checkpoint-*"))):
        if processes := len(list(folder.glob("rng_state*.pth"))):
            readings["world_size", processes] = "files of random states in the checkpoint"
            break
    if state.get("train_batch_size") is not None:
        # Of a process, which has one device; with several (DataParallel) it counts as one rank.
        micro = as_count(state["train_batch_size"], f"{path}: train_batch_size")
        readings["micro_batch_size", micro] = "train_batch_size"
    ends = [entry for entry in history if "train_loss" in entry]
    if ends and (size := _samples_a_step(ends[-1])) is not None:
        source = "train_samples_per_second / _steps_per_second"
        readings["global_batch_size", size] = source
    return readings


def _row(
    entry: Mapping[str, Any], marker: str, columns: Mapping[str, str], where: str
) -> Row | None:
    if marker not in entry:
        return None
    values = {column: entry[key] for key, column in columns.items() if entry.get(key) is not None}
    return as_row({"optimizer_step": entry.get("step"), **values}, {}, where)


def _evaluated_s(entry: Mapping[str, Any]) -> float:
    """Return the time of an evaluation of any set; 0 where the entry is none, NaN where unknown."""
    evaluation_keys = [key for key in entry if key.startswith("eval_")]
    if not evaluation_keys:
        return 0.0
    times = [as_float(entry[key], key) for key in evaluation_keys if key.endswith("_runtime")]
    return sum(times) if times else math.nan


def _counts(entry: Mapping[str, Any], evaluated_s: float, where: str) -> Row:
    """Return tokens seen and training time without evaluations, as far as the entry has them."""
    row: Row = {}
    if "num_input_tokens_seen" in entry:
        row["tokens"] = as_count(entry["num_input_tokens_seen"], f"{where}: tokens")
    if "train_runtime" in entry:
        time_s = as_float(entry["train_runtime"], f"{where}: train_runtime") - evaluated_s
        if time_s >= 0:
            row["train_time_s"] = time_s
    return row


def _time_steps(rows: list[Row], evals: list[Row], state: Mapping[str, Any]) -> None:
    """Take the time between logs for that of a step, where nothing else happened in between."""
    save_every = state.get("save_steps")
    save_every = save_every if isinstance(save_every, int) and save_every > 0 else 0
    evaluated_steps = {row["optimizer_step"] for row in evals}
    previous: Row = {"optimizer_step": 0, "train_time_s": 0.0}
    for row in rows:
        last_step, step = previous["optimizer_step"], row["optimizer_step"]
        # The time includes a checkpoint that was saved since the last step, and no log says so.
        is_saved = save_every and (step - 1) // save_every > max(last_step - 1, 0) // save_every
        if is_saved or "train_time_s" not in previous:
            row.pop("train_time_s", None)
        elif "train_time_s" in row and step == last_step + 1 and last_step not in evaluated_steps:
            row["step_time_s"] = max(row["train_time_s"] - previous["train_time_s"], 0.0)
        previous = row


def _samples_a_step(entry: Mapping[str, Any]) -> int | None:
    """Return the one whole number of samples a step that the rounded rates allow, if there is."""
    names = ("train_samples_per_second", "train_steps_per_second")
    try:
        samples, steps = (float(entry[name]) for name in names)
        smallest = math.ceil((samples - 0.0005) / (steps + 0.0005))
        largest = math.floor((samples + 0.0005) / (steps - 0.0005))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    return smallest if smallest == largest >= 1 else None
