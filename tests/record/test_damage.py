"""Run folders that were damaged at random: read as they were, or reported, and never otherwise."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from batchscape.errors import RecordError
from batchscape.record.damage import damage_of, set_aside
from batchscape.record.environment import environment
from batchscape.record.files import JsonLines, read_json, write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.gradient_sketch import read_sketch, write_sketch
from batchscape.record.progress import sweep_progress
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.record.tables import load, note_rows, seal
from exact import assert_same_rows

IGNORED = {"log.txt", "damage.json"}
"""Files that no table is made of."""


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "sweep")


@pytest.fixture
def add(sweep: SweepFolder, spec_of: Callable[..., RunSpec]) -> Callable[[Status], RunFolder]:
    """Make a run of a few rows, as a launcher and its ranks leave one."""

    def run_that(status: Status) -> RunFolder:
        spec = spec_of((2, 1, 2))
        folder = sweep.run(spec.run_id)
        spec.write(folder.config)
        write_json(folder.environment, environment({}, 2))
        write_json(folder.launch, {"attempt": 0, "timing_valid": True, "devices": [0, 1]})
        write_json(folder.command, {"observed": {"world_size": 2}})
        write_sketch(folder, np.linspace(-1, 1, 16))
        folder.log.write_text("what was printed\n")
        steps, evals, ranks = (JsonLines(folder.lines(table)) for table in TABLES)
        steps.append(
            {
                "optimizer_step": k, "samples": 4 * k, "tokens": 40 * k, "train_time_s": 0.5 * k,
                "attempt": 0, "global_batch_size": 4, "loss": 5.0 - k / 7, "step_time_s": 0.5,
                "warmup": k == 1,
            }
            for k in range(1, 8)
        )  # fmt: skip
        evals.append([{"optimizer_step": 0, "samples": 0, "attempt": 0, "eval_loss": 1 / 3}])
        ranks.append({"rank": r, "attempt": 0, "peak_allocated_gib": 1.5 + r} for r in range(2))
        for lines in (steps, evals, ranks):
            lines.close()
        stop = StopReason.BUDGET if status is Status.COMPLETED else None
        attempts = [Attempt(1.0, 0, 2.0, str(status))]
        written = RunStatus(status, stop, attempts=attempts)
        if status.is_sealed:
            seal(folder, written, 2)
        else:
            note_rows(folder, written, 2)
            written.write(folder.status)
        return folder

    return run_that


@pytest.mark.parametrize("content", [None, "{", '{"data": null}'])
def test_a_run_without_its_config_is_damaged_and_not_sealed(
    add: Callable[[Status], RunFolder], content: str | None
) -> None:
    folder = add(Status.FAILED)
    folder.config.unlink()
    if content is not None:
        folder.config.write_text(content)
    with pytest.raises(RecordError, match=r"damaged|missing"):
        seal(folder, RunStatus.read(folder.status), 2)
    assert all(folder.lines(table).exists() for table in TABLES)


def mutations(content: bytes, chance: random.Random, count: int) -> Iterator[bytes | None]:
    """Yield ways to damage a file: a byte flipped, cut out, or put in, the end lost, all lost."""
    yield None
    yield content[: chance.randrange(len(content))]
    yield content[:-1]
    for _ in range(count):
        place = chance.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << chance.randrange(8))])
        yield content[:place] + flipped + content[place + 1 :]
        yield content[:place] + content[place + 1 :]
        yield content[:place] + content[place : place + 9] + content[place:]


def check_every_file(sweep: SweepFolder, folder: RunFolder, seed: int, count: int) -> int:
    """Damage each file of a folder in turn; return how often something was found."""
    chance = random.Random(seed)
    whole, glance = load(sweep.path), sweep_progress(sweep)[0]
    sketch = read_sketch(folder)
    found = 0
    for path in sorted(folder.path.iterdir()):
        if path.name in IGNORED:
            continue
        content = path.read_bytes()
        for mutated in mutations(content, chance, count):
            if mutated == content:
                continue
            if mutated is None:
                path.unlink()
            else:
                path.write_bytes(mutated)
            tables = load(sweep.path)
            told = damage_of(folder)
            what = path.name, mutated
            if tables.damaged:
                found += 1
                # Left out by name, and said to the launcher too.
                assert list(tables.damaged) == [str(folder.path)], what
                assert len(tables.runs) == len(tables.steps) == 0, what
                assert told is not None, what
            else:
                for table in ("runs", *TABLES):
                    assert_same_rows(getattr(tables, table), getattr(whole, table))
            if told is None and path == folder.gradient_sketch and mutated is not None:
                np.testing.assert_array_equal(read_sketch(folder), sketch)
            (seen,) = sweep_progress(sweep)[0]
            assert seen.status == "damaged" or seen == glance[0] or not_shown(seen, glance[0]), what
            path.write_bytes(content)
    assert damage_of(folder) is None
    return found


def not_shown(seen: object, before: object) -> bool:
    """Whether two lines of a progress differ only in what tells of no other number.

    That is the time since a file was written, and that times do not count which did before.
    """
    one, other = dict(vars(seen)), dict(vars(before))
    apart = {name for name in one if one[name] != other[name]}
    return apart <= {"age_s", "untimed"} and ("untimed" not in apart or one["untimed"] is not None)


@pytest.mark.parametrize(
    ("status", "seed", "count"),
    [
        (Status.COMPLETED, 0, 2),
        *(
            pytest.param(status, 1, 10, marks=pytest.mark.slow)
            for status in (Status.COMPLETED, Status.FAILED)
        ),
    ],
    ids=["few-completed", "many-completed", "many-failed"],
)
def test_a_damaged_file_is_never_read_as_another_number(
    sweep: SweepFolder,
    add: Callable[[Status], RunFolder],
    status: Status,
    seed: int,
    count: int,
) -> None:
    folder = add(status)
    found = check_every_file(sweep, folder, seed, count)
    # Nearly every change of nearly every file is noticed; the rest changes nothing.
    files = len(list(folder.path.iterdir())) - 1
    assert found > files * 3 * count // 2


def test_a_damaged_run_is_set_aside_with_its_reason(
    sweep: SweepFolder, add: Callable[[Status], RunFolder]
) -> None:
    for number in (1, 2):
        folder = add(Status.FAILED)
        folder.lines("steps").write_bytes(folder.lines("steps").read_bytes()[:-300])
        reason = damage_of(folder)
        assert reason is not None
        before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
        place = set_aside(sweep, folder, reason)
        assert place == sweep.damaged / f"{folder.path.name}-{number}"
        assert not folder.path.exists()
        note = read_json(place / "damage.json")
        assert (note["run_id"], note["reason"]) == (folder.path.name, reason)
        assert {name: (place / name).read_bytes() for name in before} == before
    add(Status.COMPLETED)
    # What was set aside is no run.
    assert len(load(sweep.path).runs) == 1


def test_rows_that_are_gone_are_missed(
    sweep: SweepFolder, add: Callable[[Status], RunFolder]
) -> None:
    """A file that ends with a whole row looks like one, unless somebody has counted."""
    folder = add(Status.INTERRUPTED)
    path = folder.lines("steps")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    (damage,) = load(sweep.path).damaged.values()
    assert damage == f"{path} is damaged: 4 rows are left of 7"
    # A run that is at work may have dropped rows that it writes again.
    status = RunStatus.read(folder.status)
    status.status, status.rows = Status.RUNNING, {}
    status.write(folder.status)
    assert load(sweep.path).damaged == {}
    assert damage_of(folder) is None


def test_a_folder_that_was_only_begun_is_not_damaged(
    sweep: SweepFolder, spec_of: Callable[..., RunSpec]
) -> None:
    spec = spec_of((2, 1, 2))
    folder = sweep.run(spec.run_id)
    assert damage_of(folder) is None
    spec.write(folder.config)
    assert damage_of(folder) is None
    RunStatus(Status.PENDING).write(folder.status)
    assert damage_of(folder) is None
    write_json(folder.launch, {"attempt": 0})
    folder.status.unlink()
    assert str(damage_of(folder)) == f"{folder.status} is missing"


def test_a_folder_of_another_run_is_damaged(
    sweep: SweepFolder, add: Callable[[Status], RunFolder]
) -> None:
    folder = add(Status.COMPLETED)
    other = sweep.run("another")
    shutil.copytree(folder.path, other.path)
    assert str(damage_of(other)).endswith(f"is of run {folder.path.name}")
