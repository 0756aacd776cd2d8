"""What a real `litgpt pretrain` (0.5.13) wrote: global batch 18 asked for in micro-batches of 4.

The two files beside this one are of `--train.global_batch_size 18 --train.micro_batch_size 4
--train.max_tokens 6656 --train.max_seq_length 64 --eval.interval 2` on one CPU device: LitGPT
floors 4.5 micro-steps to 4, and drops the 2 of 26 that are left at the end.
"""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from batchscape.config import Metrics
from batchscape.errors import BatchscapeError, RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics import Log, open_reader

CONFIG = TypeAdapter(Metrics).validate_json('{"kind": "litgpt_csv", "path": "out"}')
SAMPLE = Path(__file__).parent / "litgpt_18"
GEOMETRY = BatchGeometry(1, 1, 4, 4)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "out" / "logs" / "csv" / "version_0"
    folder.mkdir(parents=True)
    shutil.copy(SAMPLE / "metrics.csv", folder)
    shutil.copy(SAMPLE / "log.txt", tmp_path)
    return tmp_path


def read(run_dir: Path, length: int | None = 64) -> Log:
    return open_reader(CONFIG, run_dir, GEOMETRY, length).read(final=True)


def file_of(run_dir: Path) -> Path:
    return run_dir / "out" / "logs" / "csv" / "version_0" / "metrics.csv"


def edit(run_dir: Path, **columns: float) -> None:
    """Multiply columns of the file."""
    path = file_of(run_dir)
    rows = list(csv.DictReader(io.StringIO(path.read_text(), newline="")))
    for row in rows:
        for name, factor in columns.items():
            if row[name]:
                row[name] = str(int(float(row[name]) * factor))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_floored_accumulation_is_found(run_dir: Path) -> None:
    observed = read(run_dir).observed
    assert observed.global_batch_size == 16
    assert observed.gradient_accumulation_steps == 4
    assert observed.micro_batch_size == 4
    assert observed.world_size == 1
    assert observed.tokens_per_optimizer_step == 16 * 64


def test_rows_are_optimizer_steps_and_agree_with_what_is_printed(run_dir: Path) -> None:
    log = read(run_dir)
    assert [row["optimizer_step"] for row in log.steps] == [1, 2, 3, 4, 5, 6]
    printed = [5.842, 5.154, 4.927, 4.955, 4.786, 4.682]
    assert [row["loss"] for row in log.steps] == pytest.approx(printed, abs=5e-4)
    assert [row["samples"] for row in log.steps] == [16, 32, 48, 64, 80, 96]
    assert [row["tokens"] for row in log.steps] == [1024 * n for n in range(1, 7)]
    assert log.problems == []


def test_the_last_evaluation_is_of_the_last_optimizer_step(run_dir: Path) -> None:
    # It is logged at iteration 26, of which two were dropped, and the one before at 23 for 24.
    evals = read(run_dir).evals
    assert [row["optimizer_step"] for row in evals] == [2, 4, 6]
    assert [row["eval_loss"] for row in evals] == pytest.approx([5.0493, 4.8269, 4.7702], abs=5e-5)
    assert [row["evaluation_s"] for row in evals] == pytest.approx([0.17772, 0.13342, 0.13018])


def test_what_is_left_of_an_accumulation_is_no_optimizer_step(run_dir: Path) -> None:
    path = file_of(run_dir)
    text = path.read_bytes()
    assert text.count(b",26,,,,4.77") == 1
    path.write_bytes(text.replace(b",26,,,,4.77", b",27,,,,4.77"))
    assert [row["optimizer_step"] for row in read(run_dir).evals] == [2, 4, 6]


def test_times_leave_evaluations_out(run_dir: Path) -> None:
    steps = read(run_dir).steps
    third = 0.7337178810048499 - 0.403343488003884 - 0.17772
    assert steps[2]["step_time_s"] == pytest.approx(third)
    whole = 1.2543365460005589 - 0.17772 - 0.13342
    assert steps[-1]["train_time_s"] == pytest.approx(whole)


def test_an_evaluation_of_unknown_time_leaves_the_time_missing(run_dir: Path) -> None:
    path = run_dir / "log.txt"
    kept = [line for line in path.read_text().splitlines() if "val time" not in line]
    path.write_text("\n".join(kept) + "\n")
    log = read(run_dir)
    assert [row["optimizer_step"] for row in log.steps if "step_time_s" in row] == [1, 2, 4, 6]
    assert [row["optimizer_step"] for row in log.steps if "train_time_s" in row] == [1, 2]
    assert [row["optimizer_step"] for row in log.evals] == [2, 4, 6]


def test_a_checkpoint_leaves_the_time_of_the_next_step_missing(run_dir: Path) -> None:
    with (run_dir / "log.txt").open("a") as file:
        file.write("Saving checkpoint to 'out/step-00000004/lit_model.pth'\n")
    steps = read(run_dir).steps
    assert [row["optimizer_step"] for row in steps if "step_time_s" not in row] == [5]


def test_the_loss_of_rank_0_is_not_that_of_two_ranks(run_dir: Path) -> None:
    edit(run_dir, total_tokens=2)
    log = read(run_dir)
    assert log.observed.world_size == 2
    assert log.observed.global_batch_size == 32
    assert not any("loss" in row for row in log.steps)
    assert log.evals == []
    assert [row["samples"] for row in log.steps][:2] == [32, 64]
    assert "rank 0 alone" in log.sources["loss"]


def test_counts_that_contradict_each_other_are_problems(run_dir: Path) -> None:
    edit(run_dir, total_tokens=1.5)
    assert "world_size is no whole number by total_tokens / tokens: 1536 / 1024" in (
        read(run_dir).problems
    )


def test_another_length_of_samples_is_a_problem(run_dir: Path) -> None:
    assert "samples have 64 tokens, sequence_length is 32" in read(run_dir, length=32).problems


def test_a_torn_row_waits(run_dir: Path) -> None:
    path = file_of(run_dir)
    text = path.read_bytes()
    path.write_bytes(text[: text.index(b"4.92749691") + 4])
    assert [row["optimizer_step"] for row in read(run_dir).steps] == [1, 2]


def test_the_last_version_counts(run_dir: Path) -> None:
    """By its number: as text, version_2 would come after version_10."""
    versions = file_of(run_dir).parents[1]
    for name in ("version_10", "version_2"):
        shutil.copytree(file_of(run_dir).parent, versions / name)
    for path in (file_of(run_dir), versions / "version_2" / "metrics.csv"):
        path.write_text("loss,iter,step\n")
    assert len(read(run_dir).steps) == 6


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (",iter,", ",iteration,", "has no column iter; its columns: batches,"),
        (",iter,", ",other,iter,", "a row has 19 values, the header 20 columns"),
        ("epoch,iter", "loss,iter", "has a column twice"),
        ("5.841547012329102", "five", "loss should be a number, got 'five'"),
        ("0,4,0.05", "0,x,0.05", "iter should be a number, got 'x'"),
    ],
)
def test_files_that_cannot_be_right(run_dir: Path, old: str, new: str, match: str) -> None:
    path = file_of(run_dir)
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode())
    with pytest.raises(RecordError, match=match):
        read(run_dir)


def test_what_is_missing_is_an_error_only_at_the_end(run_dir: Path) -> None:
    (run_dir / "log.txt").unlink()
    reader = open_reader(CONFIG, run_dir, GEOMETRY, 64)
    assert reader.read() == Log()
    with pytest.raises(RecordError, match="which alone tells the optimizer step"):
        reader.read(final=True)
    file_of(run_dir).unlink()
    assert reader.read() == Log()
    with pytest.raises(RecordError, match=r"no metrics\.csv with a row"):
        reader.read(final=True)


cell = st.sampled_from(["", "0", "4", "8", "nan", "-1", "x", "1e999", "9" * 30]) | st.text(
    alphabet='ab0"\x00\r,', max_size=4
)


@pytest.mark.slow
@given(rows=st.lists(st.lists(cell, min_size=5, max_size=5), max_size=5))
def test_garbage_in_cells_is_a_log_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("cells")
    (folder / "out").mkdir()
    lines = [["iter", "step", "loss", "samples", "val_loss"], *rows]
    text = "".join(",".join(line) + "\n" for line in lines)
    (folder / "out" / "metrics.csv").write_text(text)
    shutil.copy(SAMPLE / "log.txt", folder)
    with contextlib.suppress(BatchscapeError):
        assert isinstance(read(folder), Log)
