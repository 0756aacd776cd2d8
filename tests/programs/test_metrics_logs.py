"""JSON lines and printed text: what programs write, torn, repeated and damaged."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from batchscape.config import Metrics
from batchscape.config.metrics import EVALUATION_COLUMNS, STEP_COLUMNS
from batchscape.errors import BatchscapeError, RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics import Log, Reader, open_reader
from batchscape.programs.metrics.log import even_growth
from batchscape.record.figures import COLUMNS

ADAPTER: TypeAdapter[Any] = TypeAdapter(Metrics)
NANOGPT = {
    "kind": "regex",
    "pattern": r"iter (?P<optimizer_step>\d+): loss (?P<loss>\S+), time (?P<step_time_s>\S+)ms",
    "evaluation_pattern": r"step (?P<optimizer_step>\d+): .* val loss (?P<eval_loss>\S+)",
    "geometry_pattern": r"tokens per iteration will be: (?P<tokens_per_optimizer_step>[\d,]+)",
    "units": {"step_time_s": "ms"},
    "loss_of": "other",
    "first_step": 0,
}
NANOGPT_LOG = """tokens per iteration will be: 16,384
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2654, time 35612.51ms, mfu -100.00%
iter 1: loss 3.2100, time 12.50ms, mfu 5.00%
step 2: train loss 2.5, val loss 2.75
iter 2: loss nan, time 12.50ms, mfu 5.00%
"""
JSONL = {
    "kind": "jsonl",
    "path": "train.jsonl",
    "columns": {
        "optimizer_step": "iter",
        "loss": "train/loss",
        "eval_loss": "val/loss",
        "step_time_s": "ms",
        "samples": "seen",
    },
    "units": {"step_time_s": "ms"},
    "loss_of": "global_batch",
}


def opened(
    config: dict[str, Any], run_dir: Path, *sizes: int, length: int | None = None, **more: Any
) -> Reader:
    geometry = BatchGeometry(1, *(sizes or (1, 4, 1)))
    settings = ADAPTER.validate_json(json.dumps(config))
    return open_reader(settings, run_dir, geometry, length, **more)


def read_lines(run_dir: Path, entries: list[Any], *, final: bool = False, **config: Any) -> Log:
    text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    (run_dir / "train.jsonl").write_text(text)
    return opened(JSONL | config, run_dir).read(final=final)


def test_the_names_that_can_be_read_are_columns() -> None:
    assert set(STEP_COLUMNS) <= set(COLUMNS["steps"])
    assert set(EVALUATION_COLUMNS) <= set(COLUMNS["evals"])


def test_nanogpt_on_one_rank_without_accumulation(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(NANOGPT_LOG)
    log = opened(NANOGPT, tmp_path, 1, 16, 1, length=1024).read(final=True)
    assert [row["optimizer_step"] for row in log.steps] == [1, 2, 3]
    assert [row["loss"] for row in log.steps[:2]] == [4.2654, 3.21]
    assert math.isnan(log.steps[2]["loss"])
    assert [row["step_time_s"] for row in log.steps] == pytest.approx([35.61251, 0.0125, 0.0125])
    assert log.steps[2]["train_time_s"] == pytest.approx(35.63751)
    assert [row["optimizer_step"] for row in log.evals] == [0, 2]
    assert [row["eval_loss"] for row in log.evals] == [4.2823, 2.75]
    assert [row["train_time_s"] for row in log.evals] == pytest.approx([0.0, 35.62501])
    assert [row["tokens"] for row in log.steps] == [16384, 32768, 49152]
    assert log.readings["tokens_per_optimizer_step", 16384] == "log.txt"
    assert log.problems == []


ROOT = Path(__file__).parents[2]


def test_what_litgpt_prints_is_read_by_the_patterns_of_its_example(tmp_path: Path) -> None:
    """Printed by litgpt 0.5.13: 18 samples in micro-batches of 4 were asked for, 16 are trained."""
    study = ROOT / "examples" / "litgpt_pretrain" / "sweeps" / "litgpt_pretrain.yaml"
    config = yaml.safe_load(study.read_text())["engine"]["metrics"]
    printed = Path(__file__).parent / "litgpt_18" / "log.txt"
    log = opened(config, tmp_path, 1, 4, 4, printed=printed).read(final=True)
    assert [row["optimizer_step"] for row in log.steps] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in log.steps] == [5.842, 5.154, 4.927, 4.955, 4.786, 4.682]
    assert [row["optimizer_step"] for row in log.evals] == [2, 4, 6]
    assert [row["eval_loss"] for row in log.evals] == [5.0493, 4.8269, 4.7702]
    assert [row["evaluation_s"] for row in log.evals] == pytest.approx([0.17772, 0.13342, 0.13018])
    # What it prints as `iter time` is that of the last micro-step.
    assert not any("step_time_s" in row for row in log.steps)
    assert ("gradient_accumulation_steps", 4) in log.readings
    assert log.problems == []


def test_an_evaluation_without_its_step_needs_every_step(tmp_path: Path) -> None:
    config = {
        "kind": "regex",
        "pattern": r"step (?P<optimizer_step>\d+) loss (?P<loss>\S+)",
        "evaluation_pattern": r"held out (?P<eval_loss>\S+)",
        "loss_of": "global_batch",
    }
    path = tmp_path / "log.txt"
    path.write_text("held out 9\nstep 1 loss 3\nstep 2 loss 2\nheld out 2.5\n")
    evals = opened(config, tmp_path).read(final=True).evals
    assert [(row["optimizer_step"], row["eval_loss"]) for row in evals] == [(0, 9.0), (2, 2.5)]
    path.write_text("step 2 loss 3\nstep 4 loss 2\nheld out 2.5\n")
    with pytest.raises(RecordError, match="only 2 of 4 steps were printed; let the program print"):
        opened(config, tmp_path).read()


@pytest.mark.parametrize("sizes", [(1, 8, 2), (2, 8, 1)])
def test_the_loss_of_a_micro_batch_is_not_that_of_the_step(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    (tmp_path / "log.txt").write_text(NANOGPT_LOG)
    log = opened(NANOGPT, tmp_path, *sizes).read(final=True)
    assert not any("loss" in row for row in log.steps[:2])
    # Whatever it is a mean over: a loss that is no number is one.
    assert math.isnan(log.steps[2]["loss"])
    assert "missing in 2 rows: the program may log the mean of a part" in log.sources["loss"]


@pytest.mark.parametrize(
    ("loss_of", "sizes", "kept"),
    [
        ("global_batch", (2, 2, 2), [1, 2, 4]),
        ("other", (1, 8, 1), [1, 2]),
        ("other", (2, 4, 1), []),
        ("other", (1, 4, 2), []),
    ],
)
def test_a_loss_is_kept_only_where_it_is_the_steps(
    tmp_path: Path, loss_of: str, sizes: tuple[int, int, int], kept: list[int]
) -> None:
    lines = [{"iter": step, "train/loss": 1.0} for step in (1, 2, 4)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    log = opened(JSONL | {"loss_of": loss_of}, tmp_path, *sizes).read()
    assert [row["optimizer_step"] for row in log.steps if "loss" in row] == kept
    assert ("loss" in log.sources) == (len(kept) < 3)


def test_json_lines_of_several_kinds(tmp_path: Path) -> None:
    log = read_lines(
        tmp_path,
        [
            {"hello": "world"},
            {"iter": 0, "val/loss": 9.0},
            {"iter": 1, "train/loss": 3.0, "ms": 250, "seen": 4, "note": "other keys"},
            {"iter": 2, "train/loss": 2.0, "ms": 250, "seen": 8, "val/loss": 2.5},
            {"iter": 3, "train/loss": None, "ms": 250, "seen": 12},
        ],
        final=True,
    )
    assert [row.get("loss") for row in log.steps] == [3.0, 2.0, None]
    assert [row["step_time_s"] for row in log.steps] == [0.25] * 3
    assert [(row["optimizer_step"], row["eval_loss"]) for row in log.evals] == [(0, 9.0), (2, 2.5)]
    assert log.evals[1]["samples"] == 8
    assert log.readings["global_batch_size", 4] == "samples in the train.jsonl"


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([[1]], "line 1 is no JSON object"),
        ([{"iter": "x", "train/loss": 1}], "optimizer_step should be a number, got 'x'"),
        ([{"iter": 1.5, "train/loss": 1}], "should be a whole number from 0 on, got 1.5"),
        ([{"iter": 1, "train/loss": "3.2,"}], "loss should be a number, got '3.2,'"),
        ([{"iter": 1, "train/loss": [1]}], "loss should be a number"),
        ([{"iter": 1, "train/loss": True}], "loss should be a number"),
        ([{"iter": 10**400, "ms": 1}], "should be a number"),
        ([{"iter": 0, "train/loss": 1}], "an optimizer step should be at least 1, got 0"),
        ([{"train/loss": 1}], "line 1: optimizer_step should be a number, got None"),
        (
            [
                {"iter": 5, "train/loss": 1, "set": "train"},
                {"iter": 5, "train/loss": 2, "set": "x"},
            ],
            "optimizer step 5 comes again with another loss, 1 and then 2, in "
            """'{"iter": 5, "train/loss": 1, "set": "train"}' and """
            """'{"iter": 5, "train/loss": 2, "set": "x"}': micro-batches, ranks, epochs that """
            "count anew or two kinds of lines",
        ),
        (
            [{"iter": k, "train/loss": loss} for k, loss in ((1, 3), (2, 3), (1, 2), (2, 2))],
            "optimizer step 1 comes again with another loss, 3 and then 2",
        ),
        (
            [
                {"iter": k, "train/loss": loss}
                for k, loss in ((1, 3), (2, 2), (3, 1), (2, 9), (4, 1))
            ],
            "optimizer step 3 was logged, then a lower one, and now 4 without it: "
            """'{"iter": 4, "train/loss": 1}'""",
        ),
        (
            [{"iter": 1, "val/loss": 2, "set": "val"}, {"iter": 1, "val/loss": 9, "set": "test"}],
            "optimizer step 1 comes again with another eval_loss, 2 and then 9",
        ),
    ],
)
def test_lines_that_cannot_be_right(tmp_path: Path, entries: list[Any], match: str) -> None:
    with pytest.raises(RecordError, match=re.escape(match)):
        read_lines(tmp_path, entries)


def test_an_error_stays_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('nonsense\n{"iter": 1, "train/loss": 1}\n')
    reader = opened(JSONL, tmp_path)
    for final in (False, True):
        with pytest.raises(RecordError, match="line 1 is no JSON"):
            reader.read(final=final)


def test_what_never_came_is_an_error_only_at_the_end(tmp_path: Path) -> None:
    reader = opened(JSONL, tmp_path)
    assert reader.read() == Log()
    with pytest.raises(RecordError, match="is empty or not there"):
        reader.read(final=True)
    with pytest.raises(RecordError, match=r"has val/loss \(eval_loss\); keys that it has: iter, "):
        read_lines(tmp_path, [{"iter": 1, "train/loss": 1.0, "ms": 1.0, "seen": 4}], final=True)
    (tmp_path / "log.txt").write_text("iter 0: los 4.2654, time 35612.51ms\n")
    with pytest.raises(RecordError, match="pattern matches no line of"):
        opened(NANOGPT, tmp_path).read(final=True)


STEP = {
    "kind": "regex",
    "pattern": r"step (?P<optimizer_step>\d+) loss (?P<loss>\S+)",
    "loss_of": "global_batch",
}


def losses(log: Log) -> dict[int, float]:
    return {int(row["optimizer_step"]): row["loss"] for row in log.steps}


def test_steps_that_every_rank_prints_for_itself_are_refused(tmp_path: Path) -> None:
    """Rank 1 has other losses; a second line with the same numbers says nothing else."""
    path = tmp_path / "log.txt"
    path.write_text("".join(f"step {k} loss {k + r}\n" for k in (1, 2, 3) for r in (0, 1)))
    with pytest.raises(RecordError, match="1 comes again with another loss, 1 and then 2, in"):
        opened(STEP, tmp_path, 2, 4, 1).read()
    path.write_text("".join(f"step {k} loss {k}\n" * 2 for k in (1, 2, 3)))
    assert losses(opened(STEP, tmp_path, 2, 4, 1).read()) == {1: 1.0, 2: 2.0, 3: 3.0}


TORCHRUN = (
    "E1128 17:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:984] failed "
    "(exitcode: 1) local_rank: 0 (pid: 11) of binary: python\n"
)


@pytest.mark.parametrize(
    "again",
    [
        "step 2 loss 5\nstep 3 loss 6\n",
        f"{TORCHRUN}step 3 loss 6\n",
        f"{TORCHRUN}step 1 loss 4\nstep 2 loss 5\nstep 3 loss 6\n",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_come_again_replace_those_before(tmp_path: Path, again: str, ranks: int) -> None:
    (tmp_path / "log.txt").write_text(f"step 1 loss 9\nstep 2 loss 5\nstep 3 loss 3\n{again}")
    log = opened(STEP, tmp_path, ranks, 4, 1).read(final=True)
    assert losses(log) == {1: 4.0 if "loss 4" in again else 9.0, 2: 5.0, 3: 6.0}
    assert "come again in its metrics" in log.sources["optimizer_step"]


def test_the_last_step_once_more_is_that_of_the_next_start(tmp_path: Path) -> None:
    """What an earlier attempt left ends at step 2, which this one trains again."""
    first = (
        '{"iter": 1, "train/loss": 3}\n{"iter": 2, "train/loss": 2}\n{"iter": 2, "val/loss": 4}\n'
    )
    (tmp_path / "train.jsonl").write_text(first)
    reader = opened(JSONL, tmp_path)
    again = first + '{"iter": 2, "train/loss": 1}\n{"iter": 2, "val/loss": 5}\n'
    (tmp_path / "train.jsonl").write_text(again)
    log = reader.read()
    assert losses(log) == {1: 3.0, 2: 1.0}
    assert [(row["optimizer_step"], row["eval_loss"]) for row in log.evals] == [(2, 5.0)]
    assert log.sources["eval_loss"].startswith("evaluations of optimizer steps 2 to 2 come again")
    with pytest.raises(RecordError, match="step 2 comes again with another loss, 2 and then 1"):
        opened(JSONL, tmp_path).read()


def test_what_another_rank_prints_once_more_costs_no_evaluation(tmp_path: Path) -> None:
    """Both ranks print the mean over both, one after the other; rank 0 alone evaluates."""
    config = STEP | {"evaluation_pattern": r"eval (?P<optimizer_step>\d+): (?P<eval_loss>\S+)"}
    text = "".join(f"step {k} loss {9 - k}\neval {k}: {12 - k}\n" for k in (1, 2, 3))
    text += "".join(f"step {k} loss {9 - k}\n" for k in (1, 2, 3))
    (tmp_path / "log.txt").write_text(text)
    log = opened(config, tmp_path, 2, 4, 1).read(final=True)
    assert losses(log) == {1: 8.0, 2: 7.0, 3: 6.0}
    evals = [(row["optimizer_step"], row["eval_loss"]) for row in log.evals]
    assert evals == [(1, 11.0), (2, 10.0), (3, 9.0)]


@pytest.mark.parametrize(
    "printed",
    [
        "held out 2\nheld out 9\n",
        "held out 2\nstep 2 loss 2\nheld out 1.5\nbest: held out 1\n",
    ],
)
def test_a_second_evaluation_of_a_step_is_refused(tmp_path: Path, printed: str) -> None:
    """Of a validation and a test set; of the last and of the best model."""
    config = STEP | {"evaluation_pattern": r"held out (?P<eval_loss>\S+)"}
    (tmp_path / "log.txt").write_text(f"step 1 loss 3\n{printed}")
    with pytest.raises(RecordError, match=r"comes again with another eval_loss, [\d.]+ and then"):
        opened(config, tmp_path, 1, 4, 1).read(final=True)


def test_counts_since_a_start_are_none_of_the_run(tmp_path: Path) -> None:
    """Batch 4: a restart at step 4 counts samples, and its clock, from there."""
    clock = {"columns": JSONL["columns"] | {"train_time_s": "t"}}
    clock["units"] = JSONL["units"] | {"train_time_s": "s"}
    first = [{"iter": k, "train/loss": 9 - k, "seen": 4 * k, "t": 2 * k} for k in (1, 2, 3, 4, 5)]
    later = [{"iter": k, "train/loss": 9, "seen": 4 * (k - 3), "t": 30 + k} for k in (4, 5, 6)]
    later.append({"iter": 6, "val/loss": 3.0, "seen": 12, "t": 36})
    texts = ["".join(f"{json.dumps(entry)}\n" for entry in part) for part in (first, later)]
    (tmp_path / "train.jsonl").write_text(texts[0])
    reader = opened(JSONL | clock, tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(texts))
    log = reader.read()
    assert [row["samples"] for row in log.steps] == [4, 8, 12, 16, 20, 24]
    assert [row.get("train_time_s") for row in log.steps] == [2.0, 4.0, 6.0, None, None, None]
    (evaluation,) = log.evals
    assert (evaluation["samples"], evaluation.get("train_time_s")) == (24, None)
    assert log.problems == []
    assert log.sources["train_time_s"].startswith("not read from optimizer step 4 on")


def test_what_lies_beyond_the_checkpoint_of_a_restart_is_dropped(tmp_path: Path) -> None:
    """By hand: from 4 it goes on at 3; the evaluation of 4 is of another training."""
    entries = [
        *({"iter": k, "train/loss": 10.0 - k} for k in (1, 2, 3, 4)),
        *({"iter": k, "val/loss": 20.0 - k} for k in (2, 4)),
        *({"iter": k, "train/loss": 5.0} for k in (3, 4, 5)),
    ]
    log = read_lines(tmp_path, entries)
    assert losses(log) == {1: 9.0, 2: 8.0, 3: 5.0, 4: 5.0, 5: 5.0}
    assert [(row["optimizer_step"], row["eval_loss"]) for row in log.evals] == [(2, 18.0)]


def test_a_late_column_of_an_earlier_step_is_no_restart(tmp_path: Path) -> None:
    entries = [{"iter": 1, "train/loss": 3.0}, {"iter": 2, "train/loss": 2.0}, {"iter": 1, "ms": 5}]
    first, second = read_lines(tmp_path, entries).steps
    assert (first["step_time_s"], second["loss"]) == (0.005, 2.0)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_log_whose_first_steps_are_written_over_is_refused(tmp_path: Path, goes_on: bool) -> None:
    """Of one program, looked at while it runs, and of one that a next attempt starts again."""
    text = "".join(f'{{"iter": {k}, "train/loss": {9.0 - k}}}\n' for k in (1, 2, 3, 4))
    (tmp_path / "train.jsonl").write_text(text)
    reader = opened(JSONL, tmp_path)
    if not goes_on:
        reader.read()
    (tmp_path / "train.jsonl").write_text("")
    reader.read()
    (tmp_path / "train.jsonl").write_text(text[: text.index("\n") + 1])
    assert losses(reader.read()) == {1: 8.0}, "a start from the beginning may do so"
    (tmp_path / "train.jsonl").write_text('{"iter": 3, "train/loss": 1.0}\n')
    with pytest.raises(RecordError, match="written over and begins with optimizer step 3 now"):
        reader.read()


def test_what_can_be_no_time_is_missing(tmp_path: Path) -> None:
    entries = [
        {"iter": k, "train/loss": 1.0, "ms": ms} for k, ms in ((1, math.nan), (2, 500), (3, -1))
    ]
    log = read_lines(tmp_path, entries)
    assert [row.get("step_time_s") for row in log.steps] == [None, 0.5, None]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=6))
def test_growth_is_even_exactly_where_every_step_adds_as_much(
    moves: list[tuple[int, int]],
) -> None:
    step = samples = 0
    rows = []
    for steps, growth in moves:
        step, samples = step + steps, samples + growth
        rows.append({"optimizer_step": step, "samples": samples})
    size, uneven = even_growth(rows, "samples")
    fits = [n for n in range(41) if all(growth == n * steps for steps, growth in moves)]
    if not moves:
        assert (size, uneven) == (None, None)
    else:
        assert size == (fits[0] if fits else None)
        assert (uneven is None) == bool(fits)


@pytest.mark.slow
@given(cuts=st.lists(st.integers(0, len(NANOGPT_LOG)), max_size=8))
def test_text_that_comes_in_pieces_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    path = folder / "log.txt"
    reader = opened(NANOGPT, folder)
    for cut in sorted(cuts):
        path.write_text(NANOGPT_LOG[:cut])
        # A torn line holds a number that is cut off, and must not be read.
        lines = NANOGPT_LOG[:cut].rpartition("\n")[0]
        assert len(reader.read().steps) == lines.count("iter ")
    path.write_text(NANOGPT_LOG)
    assert repr(reader.read(final=True)) == repr(opened(NANOGPT, folder).read(final=True))


@pytest.mark.slow
@given(cut=st.integers(0, 200))
def test_a_json_line_that_is_cut_off_is_left_out(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    lines = [
        json.dumps({"iter": i, "train/loss": 1.25, "val/loss": 1.5, "ms": 1, "seen": 4 * i})
        for i in (1, 2)
    ]
    text = "\n".join(lines)
    folder = tmp_path_factory.mktemp("cut")
    (folder / "train.jsonl").write_text(text[: len(lines[0]) + 1 + cut])
    log = opened(JSONL, folder).read(final=True)
    assert len(log.steps) == (2 if cut >= len(lines[1]) else 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
entries = st.dictionaries(
    st.sampled_from(["iter", "train/loss", "val/loss", "ms", "seen", "x"]), json_values
)
garbage = st.lists(
    entries.map(lambda entry: json.dumps(entry).encode()) | st.binary(max_size=40), max_size=6
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "file"),
    [
        (JSONL, "train.jsonl"),
        (NANOGPT, "log.txt"),
        ({"kind": "recorder"}, "recorder/rank_0.jsonl"),
        ({"kind": "trainer_state"}, "trainer_state.json"),
    ],
)
@given(lines=garbage)
def test_garbage_is_a_log_or_an_error_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], file: str, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("garbage")
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    reader = opened(config, folder, length=8)
    for final in (False, True):
        with contextlib.suppress(BatchscapeError):
            assert isinstance(reader.read(final=final), Log)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pattern": "("}, "pattern is no regular expression"),
        ({"pattern": r"(?P<loss>\S+)"}, r"pattern must have a group \(\?P<optimizer_step>"),
        ({"pattern": r"(?P<optimizer_step>\d+)"}, "must have a group beside the step"),
        ({"pattern": r"(?P<optimizer_step>\d+) (?P<los>.)"}, "pattern names los; what can be"),
        ({"units": {}}, r"one of s, ms, us, min, h; read: \['step_time_s'\], given \{\}"),
        ({"units": {"step_time_s": "ms", "data_s": "s"}}, r"\['step_time_s'\], given .*data_s"),
        ({"loss_of": None}, "loss is read, and loss_of is not set: set it to"),
    ],
)
def test_settings_that_cannot_be_right(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        ADAPTER.validate_json(json.dumps(NANOGPT | change))


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (
            {"loss": "l"},
            "columns needs optimizer_step with the program's key of it, as in "
            "{optimizer_step: iter}; given {'loss': 'l'}",
        ),
        ({"optimizer_step": "i", "los": "l"}, "columns names los; what can be read: "),
    ],
)
def test_columns_that_cannot_be_right(columns: dict[str, str], match: str) -> None:
    config = JSONL | {"columns": columns, "units": {}, "loss_of": None}
    with pytest.raises(ValidationError, match=match):
        ADAPTER.validate_json(json.dumps(config))


def test_what_was_printed_before_this_start_is_not_its_metrics(tmp_path: Path) -> None:
    path = tmp_path / "printed.txt"
    path.write_text(NANOGPT_LOG)
    (tmp_path / "log.txt").write_text("the program's own\n")
    reader = opened(NANOGPT, tmp_path, printed=path, printed_before=path.stat().st_size)
    assert reader.read().steps == []
    with pytest.raises(RecordError, match="matches no line"):
        reader.read(final=True)


@pytest.mark.parametrize("path", ["", "..", "../other/train.jsonl", "/data/train.jsonl"])
@pytest.mark.parametrize("kind", ["jsonl", "regex", "trainer_state"])
def test_metrics_of_elsewhere_are_refused(kind: str, path: str) -> None:
    config = {"jsonl": JSONL, "regex": NANOGPT}.get(kind, {"kind": kind})
    with pytest.raises(ValidationError, match="below it"):
        ADAPTER.validate_json(json.dumps({**config, "path": path}))


PLACES = {
    "recorder": ({"kind": "recorder"}, "recorder/rank_0.jsonl"),
    "jsonl": (JSONL, "train.jsonl"),
    "regex": (NANOGPT | {"path": "out.txt"}, "out.txt"),
    "trainer_state": ({"kind": "trainer_state", "path": "out"}, "out/trainer_state.json"),
}


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_refused_and_not_opened(place, make, tmp_path) -> None:
    config, name = PLACES[place]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    with pytest.raises(RecordError, match=rf"{path.name} is no regular file: metrics"):
        opened(config, tmp_path).read(final=True)


def test_blank_lines_and_a_last_object_without_its_line_end_are_read(tmp_path: Path) -> None:
    entries = [json.dumps({"iter": k, "train/loss": 9.0 - k}) for k in (1, 2, 3)]
    (tmp_path / "train.jsonl").write_text("\n   \n".join(entries) + " ")
    columns = {"optimizer_step": "iter", "loss": "train/loss"}
    log = opened(JSONL | {"columns": columns, "units": {}}, tmp_path).read(final=True)
    assert losses(log) == {1: 8.0, 2: 7.0, 3: 6.0}
