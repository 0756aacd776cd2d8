"""Tables of others: understood as stated, or refused with a rule."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.analysis.targets.columns import ALIASES
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.foreign import STATUS_WORDS, ReadOptions, as_table, read_table
from batchscape.analysis.targets.summary import reaches_table
from batchscape.errors import AnalysisError


def table(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text.replace(" ", "")))


STEPS = """batch_size,trial,steps
8,0,100
8,1,110
16,0,60
16,1,
32,0,inf
32,1,45
"""
CURVES = """batch_size,seed,step,val_loss
8,0,0,5.0
8,0,10,3.0
16,0,0,5.0
16,0,10,nan
"""


def test_steps_to_target_are_recognised_and_every_renaming_is_said():
    foreign = as_table(table(STEPS))
    assert foreign.kind == "reaches"
    assert foreign.table["outcome"].tolist() == [
        "reached", "reached", "reached", "censored", "diverged", "reached",
    ]  # fmt: skip
    assert foreign.table["global_batch_size"].tolist() == [8, 8, 16, 16, 32, 32]
    assert foreign.table["samples_to_target"].tolist()[:3] == [800.0, 880.0, 960.0]
    assert foreign.table["steps_low"].tolist()[3:5] == [0.0, math.inf]
    assert foreign.notes == (
        "batch_size is taken for global_batch_size",
        "trial is taken for seed",
        "steps is taken for steps_to_target",
    )


def test_curves_are_recognised_by_their_loss():
    foreign = as_table(table(CURVES), ReadOptions(nan="diverged"))
    assert foreign.kind == "curves"
    assert foreign.table["samples"].tolist() == [0, 80, 0, 160]
    assert foreign.table["run"].nunique() == 2
    assert "val_loss is taken for loss" in foreign.notes
    assert any("rows of one group, global_batch_size, seed are a run" in n for n in foreign.notes)


def test_a_name_that_is_given_decides():
    both = table(STEPS).assign(steps_to_target=1.0)
    assert as_table(both).table["steps_to_target"].eq(1.0).all()
    foreign = as_table(both, ReadOptions(columns={"steps_to_target": "steps"}))
    assert foreign.table["steps_to_target"].iloc[0] == 100.0


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_no_alias_serves_two_names(name):
    others = {alias for other, names in ALIASES.items() if other != name for alias in names}
    assert not others & {name, *ALIASES[name]}


def test_groups_keep_rows_apart():
    two = pd.concat([table(STEPS).assign(model="a"), table(STEPS).assign(model="b")])
    with pytest.raises(AnalysisError, match=r"global_batch_size=8, seed=0 is there .* --group"):
        as_table(two)
    foreign = as_table(two, ReadOptions(group=["model"]))
    assert foreign.groups == {0: "a", 1: "b"}
    assert foreign.table["group"].value_counts().to_dict() == {0: 6, 1: 6}


def test_a_setting_that_is_not_used_is_named():
    rates = pd.concat([table(STEPS).assign(width=64, target=3.0),
                       table(STEPS).assign(width=128, target=2.0)])  # fmt: skip
    assert "not used, and it varies: width" in as_table(rates).notes[-1]
    assert not any(
        "not used" in note for note in as_table(rates, ReadOptions(group=["width"])).notes
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 8}, "several columns could be global_batch_size: batch_size, batch"),
        ({"steps": "ten"}, "steps_to_target is a number .* such as 'ten' in row 1"),
        ({"trial": math.nan}, "seed is there in every row"),
        ({"trial": 0}, "a run reaches a target once"),
        ({"target_loss": math.inf}, "target_loss is a finite number in every row"),
        ({"lr": 0}, "learning_rate is a finite number above 0"),
        ({"outcome": "lost"}, "outcome is one of reached, censored"),
        ({"outcome": "reached"}, "'reached' where steps are finite"),
        ({"status": "diverged"}, "not 'diverged' where a target was reached"),
        ({"samples_to_target": 51200.0}, r"samples_to_target is .* 64 times that.* tokens"),
    ],
)
def test_bad_values_are_refused(change, message):
    with pytest.raises(AnalysisError, match=message):
        as_table(table(STEPS).assign(**change))


def test_bad_columns_are_refused():
    with pytest.raises(AnalysisError, match="needs the columns global_batch_size, steps_to_target"):
        as_table(pd.DataFrame({"a": [1]}))
    with pytest.raises(AnalysisError, match="is empty"):
        as_table(table(STEPS).iloc[:0])
    with pytest.raises(AnalysisError, match="batch_size_tokens counts tokens"):
        as_table(table(STEPS).rename(columns={"batch_size": "batch_size_tokens"}))
    with pytest.raises(AnalysisError, match="no such column; it has: batch_size, trial, steps"):
        as_table(table(STEPS), ReadOptions(group=["model"]))
    with pytest.raises(AnalysisError, match="no column 'x'"):
        as_table(table(STEPS), ReadOptions(columns={"seed": "x"}))
    with pytest.raises(AnalysisError, match="'sede' is no column of ours"):
        as_table(table(STEPS), ReadOptions(columns={"sede": "trial"}))
    with pytest.raises(AnalysisError, match="one column cannot be two things"):
        as_table(table(STEPS), ReadOptions(columns={"seed": "trial", "run": "trial"}))
    with pytest.raises(AnalysisError, match="more than one is called batch_size"):
        as_table(table(STEPS.replace("trial", "batch_size")))
    with pytest.raises(AnalysisError, match="needs optimizer_step or samples"):
        as_table(table(CURVES).drop(columns="step"), ReadOptions(nan="diverged"))
    with pytest.raises(AnalysisError, match="several at step 10"):
        as_table(pd.concat([table(CURVES), table(CURVES).iloc[[1]]]), ReadOptions(nan="diverged"))


def test_every_kind_of_file_gives_the_same(tmp_path):
    rows = table(STEPS)
    rows.to_csv(tmp_path / "a.csv", index=False)
    rows.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    rows.to_parquet(tmp_path / "a.parquet")
    # JSON has no infinity.
    rows.replace(np.inf, 1e6).to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    first = read_table(tmp_path / "a.csv")
    for ending in ("tsv", "parquet"):
        again = read_table(tmp_path / f"a.{ending}")
        pd.testing.assert_frame_equal(first.table, again.table)
    assert len(read_table(tmp_path / "a.jsonl").table) == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xlsx", b"", "a file that ends in .csv"),
        ("missing.csv", None, "there is no such file"),
        ("a.csv", b"", "cannot be read as csv: No columns"),
        ("a.csv", b'a,b\n"1,2\n', "cannot be read as csv|needs the columns"),
        ("a.csv", bytes(range(256)), "cannot be read as csv"),
        ("a.parquet", b"PAR1 and no more", "cannot be read as parquet"),
        ("a.jsonl", b"{not json", "cannot be read as lines"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AnalysisError, match=message):
        read_table(tmp_path / name)


cells = st.one_of(
    st.none(),
    st.integers(-3, 40),
    st.floats(),
    st.sampled_from(["", "diverged", "1e3", "ten", "8 "]),
)
names = st.sampled_from([*ALIASES, "batch_size", "steps", "step", "val_loss", "model", "x", "lr"])


@settings(max_examples=150)
@given(st.data())
def test_whatever_comes_is_understood_or_refused(data):
    columns = data.draw(st.lists(names, min_size=1, max_size=6, unique=True))
    n = data.draw(st.integers(0, 5))
    content = {name: data.draw(st.lists(cells, min_size=n, max_size=n)) for name in columns}
    with contextlib.suppress(AnalysisError):
        assert len(as_table(pd.DataFrame(content)).table) == n


BENT = """batch,seed,step,val_loss
8,0,0,5.0
8,0,10,3.0
8,0,20,{0}
8,0,30,2.9
8,1,0,5.0
8,1,10,3.0
8,1,20,2.9
8,1,30,{0}
"""


def crossings(foreign: pd.DataFrame) -> list[tuple[str, float]]:
    reached = steps_to_target(foreign, [3.5])
    return list(zip(reached["outcome"], reached["steps_high"], strict=True))


@pytest.mark.parametrize(("text", "logged"), [("", False), ("NA", False), ("nan", True)])
def test_an_empty_loss_is_missing_and_nan_was_logged(tmp_path, text, logged):
    path = tmp_path / "t.csv"
    path.write_text(BENT.format(text))
    # Missing: neither resets the sustained crossing, nor ends the run. Logged: both do.
    kept, lost = [("reached", 10.0)] * 2, [("reached", 30.0), ("diverged", math.inf)]
    foreign = read_table(path)
    assert crossings(foreign.table) == (lost if logged else kept)
    words = "2 of 8 losses are NaN, taken as logged" if logged else "2 of 8 rows have no loss"
    assert any(words in note for note in foreign.notes)
    assert crossings(read_table(path, ReadOptions(nan="missing")).table) == kept


def test_a_run_without_any_loss_stays_in_the_counts(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(BENT.format("2.9") + "8,2,10,\n8,2,20,\n")
    assert crossings(read_table(path).table)[-1] == ("censored", math.inf)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_formats_that_tell_missing_from_nan_are_read_so(tmp_path, kind):
    missing = [5.0, 3.0, None, 2.9, 5.0, 3.0, 2.9, float("nan")]
    rows = table(BENT.format("2.9")).assign(val_loss=pd.Series(missing, dtype=object))
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        names = rows.columns.drop("val_loss")
        columns = {name: pa.array(rows[name].to_numpy()) for name in names}
        pq.write_table(pa.table({**columns, "val_loss": pa.array(missing)}), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows.to_dict("records")))
    foreign = read_table(path)
    assert crossings(foreign.table) == [("reached", 10.0), ("diverged", math.inf)]
    assert crossings(read_table(path, ReadOptions(nan="missing")).table) == [("reached", 10.0)] * 2


def test_what_pandas_cannot_tell_is_asked_about(tmp_path):
    rows = table(BENT.format(""))
    rows.to_parquet(tmp_path / "t.parquet")
    for ask in (lambda **nan: as_table(rows, ReadOptions(**nan)),
                lambda **nan: as_table(rows.convert_dtypes(), ReadOptions(**nan)),
                lambda **nan: read_table(tmp_path / "t.parquet", ReadOptions(**nan))):  # fmt: skip
        with pytest.raises(AnalysisError, match=r"no number in 2 of 8 rows, such as row 3.*--nan"):
            ask()
        assert crossings(ask(nan="missing").table) == [("reached", 10.0)] * 2
        assert crossings(ask(nan="diverged").table)[1] == ("diverged", math.inf)


def test_a_column_of_groups_is_used():
    # Seeds of their own: nothing else tells the two models apart.
    two = pd.concat([table(STEPS).assign(group="a"),
                     table(STEPS).assign(group="b", trial=lambda t: t["trial"] + 2)])  # fmt: skip
    foreign = as_table(two)
    assert foreign.groups == {0: "a", 1: "b"}
    assert foreign.table["group"].tolist() == [0] * 6 + [1] * 6
    assert "2 groups, never pooled: a and b" in foreign.notes
    assert as_table(two.assign(size=1), ReadOptions(group=["size"])).groups == {
        0: "a, 1",
        1: "b, 1",
    }
    assert as_table(two, ReadOptions(group=["group"])).groups == {0: "a", 1: "b"}
    with_models = two.rename(columns={"group": "model"})
    assert "not used, and it varies: model" in as_table(with_models).notes[-1]
    assert as_table(with_models, ReadOptions(columns={"group": "model"})).groups == {0: "a", 1: "b"}


def test_cuts_of_one_trajectory_are_no_further_seeds():
    cuts = pd.concat([table(STEPS), table(STEPS)])
    with_ids = cuts.assign(trajectory_id=cuts["batch_size"].astype(str) + cuts["trial"].astype(str))
    assert reaches_table(as_table(with_ids).table)["n"].tolist() == [2, 2, 2]
    with pytest.raises(AnalysisError, match="a run reaches a target once"):
        as_table(cuts)


FINAL = """batch,lr,seed,step,loss
8,0.1,0,100,2.5
8,0.2,0,100,2.3
8,0.4,0,100,nan
16,0.1,0,50,
16,0.2,0,50,2.4
16,0.4,0,50,2.2
"""


def test_one_loss_a_run_is_a_table_of_final_losses(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(FINAL)
    foreign = read_table(path)
    assert foreign.kind == "final losses"
    assert foreign.table["final_eval_loss"].tolist() == [2.5, 2.3, math.inf, 2.4, 2.2]
    assert foreign.table["samples"].eq(800).all()
    assert read_table(path, ReadOptions(minimise="steps")).kind == "curves"
    path.write_text(FINAL.replace(",step", "").replace(",100", "").replace(",50", ""))
    assert read_table(path).table["final_eval_loss"].tolist() == [2.5, 2.3, math.inf, 2.4, 2.2]
    with pytest.raises(AnalysisError, match="needs optimizer_step or samples"):
        read_table(path, ReadOptions(minimise="steps"))


def test_the_last_losses_of_curves_are_minimised_where_asked():
    rows = table(BENT.format("2.9"))
    assert as_table(rows).kind == "curves"
    foreign = as_table(
        rows.assign(status=["completed"] * 7 + ["diverged"]), ReadOptions(minimise="loss")
    )
    assert foreign.table["final_eval_loss"].tolist() == [2.9, math.inf]
    both = table(STEPS).assign(loss=2.0)
    with pytest.raises(
        AnalysisError,
        match=r"both loss and steps_to_target, .* choose --minimise loss or --minimise steps",
    ):
        as_table(both.rename(columns={"steps": "steps_to_target"}))


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("COMPLETE", "completed"),
        ("TrialState.PRUNED", "pruned"),
        ("Finished", "completed"),
        ("CRASHED", "failed"),
        ("KILLED", "interrupted"),
        ("TIMEOUT", "timeout"),
        ("OUT_OF_MEMORY", "oom"),
        ("CANCELLED by 1000", "interrupted"),
        ("Diverged", "diverged"),
    ],
)
def test_words_of_status_of_others(word, status):
    curves = pd.DataFrame({"bs": 8, "step": [1, 2], "val_loss": [3.0, 2.0], "state": [word] * 2})
    assert set(as_table(curves).table["status"]) == {status}


@pytest.mark.parametrize("status", STATUS_WORDS)
def test_the_page_has_all_words_of_a_status(status):
    page = Path(__file__).parents[3] / "docs" / "analysis_tables.md"
    words = ", ".join(f"`{word}`" for word in STATUS_WORDS[status])
    assert f"| `{status}` | {words}".strip() in page.read_text()


@pytest.mark.parametrize("word", ["TERMINATED", "stopped", "CA", "EARLY_STOPPED"])
def test_a_word_of_status_that_is_not_known_is_asked_about(word):
    curves = pd.DataFrame({"bs": 8, "step": [1, 2], "val_loss": [3.0, 2.0], "state": word})
    with pytest.raises(AnalysisError, match=rf"status '{word}' \(2 rows\).* completed, oom, "):
        as_table(curves)


def test_columns_that_clash_and_are_not_needed_do_not_matter():
    curves = pd.DataFrame(
        {
            "bs": 8,
            "step": [1, 2],
            "val_loss": [3.0, 2.0],
            "system/gpu.0": 1.0,
            "system/gpu_0": 2.0,
            "time_s": 1.0,
            "seconds": 2.0,
            "examples": 1.0,
            "sequences": 1.0,
            "run_id": "a7x",
            "run_name": "small",
        }
    )
    foreign = as_table(curves)
    assert set(foreign.table["run_id"]) == {"a7x"}
    assert foreign.table["train_time_s"].isna().all()
    assert foreign.table["samples"].tolist() == [8, 16]


def test_runs_that_two_columns_tell_apart_otherwise_are_asked_about():
    curves = pd.DataFrame({"bs": 8, "step": [1, 2], "val_loss": 3.0, "run_name": "small"})
    with pytest.raises(AnalysisError, match="several columns could be run: run_id, run_name"):
        as_table(curves.assign(run_id=["a", "b"]))


def test_names_of_runs_may_be_lists():
    """As JSON lines may have them."""
    rows = [{"batch_size": 8, "run": [8, seed], "seed": seed, "steps": 100} for seed in range(3)]
    assert as_table(pd.DataFrame(rows)).table["run_id"].tolist() == ["[8, 0]", "[8, 1]", "[8, 2]"]


def test_a_clash_that_matters_is_refused_unless_one_is_named():
    curves = pd.DataFrame({"bs": 8, "step": [1, 2], "val/loss": [3.0, 2.0], "val_loss": [9.0, 8.0]})
    with pytest.raises(AnalysisError, match="more than one is called val_loss"):
        as_table(curves)
    assert as_table(curves, ReadOptions(columns={"loss": "val/loss"})).table["loss"].tolist() == [
        3.0,
        2.0,
    ]


def test_a_chart_of_wandb_is_told_from_a_table():
    chart = pd.DataFrame(
        {"Step": [100, 200]} | {f"b8s0 - eval/loss{end}": 1.0 for end in ("", "__MIN", "__MAX")}
    )
    with pytest.raises(AnalysisError, match=r"one column a run \(b8s0 - eval/loss\), and nothing"):
        as_table(chart)


@pytest.mark.parametrize(
    "steps", [[0, 50, 100, 150, 199], [50, 100, 150, 199], [1, 2, 3, 4], [1, 10, 20, 30], [9, 19]]
)
def test_steps_that_may_be_what_was_done_are_taken_as_they_are(steps):
    curves = pd.DataFrame({"bs": 8, "step": steps, "val_loss": 1.0 / (1 + np.array(steps))})
    assert as_table(curves).table["optimizer_step"].tolist() == steps


@pytest.mark.parametrize(
    ("runs", "numbers_text"),
    [
        ([[0, 49, 99, 149, 199]], "49, 99, 149, each one less than a multiple of 50"),
        ([[9, 19, 29, 39], [23, 29, 39, 49]], "9, 19, 29, each one less than a multiple of 10"),
        ([[23, 29, 39, 49], [9, 19, 29, 35]], "9, 19, 29, each one less than a multiple of 10"),
        ([[0, 1, 2, 3]], "0, 1, 2: is its first optimizer step number 0"),
    ],
)
def test_steps_that_may_be_numbers_from_0_are_asked_about(runs, numbers_text):
    """That of 0 may be of no step; one run that was resumed does not speak for the others."""
    rows = [(8 * 2**k, step, 1 / (1 + step)) for k, run in enumerate(runs) for step in run]
    curves = pd.DataFrame(rows, columns=["bs", "step", "val_loss"])
    with pytest.raises(AnalysisError, match=f"a run was measured at {numbers_text}"):
        as_table(curves)
    for first in (0, 1):
        foreign = as_table(curves, ReadOptions(first_step=first)).table["optimizer_step"]
        assert foreign.tolist() == (curves["step"] + 1 - first).tolist()
    with pytest.raises(AnalysisError, match=r"--first-step is 0 or 1, the number of .*; got -5"):
        as_table(curves, ReadOptions(first_step=-5))


def test_the_step_of_a_file_of_wandb_is_asked_about():
    curves = pd.DataFrame({"bs": 8, "Step": [2, 4, 6], "val_loss": [3.0, 2.0, 1.0]})
    with pytest.raises(
        AnalysisError, match=r"needs optimizer_step .* \(or Step\) counts calls of its"
    ):
        as_table(curves)
    foreign = as_table(curves, ReadOptions(columns={"optimizer_step": "Step"}))
    assert foreign.table["optimizer_step"].tolist() == [2, 4, 6]
    both = as_table(curves.assign(global_step=[1, 2, 3]))
    assert both.table["optimizer_step"].tolist() == [1, 2, 3]
