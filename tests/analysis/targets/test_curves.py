"""Curves and groups from sweep folders, against what was written there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.cells import find_cells
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curve_groups, curves_of
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables, load


def loaded(sweep: Any) -> tuple[Any, Tables]:
    tables = load(sweep.path)
    return find_cells(tables.runs), tables


def test_a_curve_holds_what_its_run_measured(build):
    sweep = build()
    folders = [sweep.run((1, 16, 1), seed=0), sweep.run((2, 16, 1), seed=3)]
    cells, tables = loaded(sweep)
    curves = curves_of(cells, tables)
    for folder in folders:
        curve = curves[curves["run_id"].eq(folder.path.name)]
        written = pd.read_parquet(folder.parquet("evals"))
        for name, column in {"loss": "eval_loss", "samples": "samples", "tokens": "tokens"}.items():
            assert curve[name].tolist() == written[column].tolist()
        assert curve["optimizer_step"].iloc[0] == 0
    assert sorted(curves["global_batch_size"].unique()) == [16, 32]
    assert sorted(curves["seed"].unique()) == [0.0, 3.0]
    assert curves["learning_rate"].eq(1e-3).all()
    assert not curves["averaged"].any()
    assert curves["train_time_s"].notna().all()


def test_times_are_missing_where_they_are_not_valid(build):
    sweep = build()
    sweep.run((1, 16, 1))
    sweep.run((1, 32, 1), concurrent_runs=2)
    curves = curves_of(*loaded(sweep))
    assert curves.groupby("global_batch_size")["train_time_s"].count().gt(0).to_dict() == {
        16: True,
        32: False,
    }


def test_samples_of_a_classification_are_no_tokens(build):
    sweep = build()
    sweep.run(
        (1, 16, 1),
        task="class",
        model={"name": "mlp", "hidden_sizes": [8]},
        data={"name": "digits"},
    )
    curves = curves_of(*loaded(sweep))
    assert curves["tokens"].isna().all()
    assert curves["samples"].notna().all()
    assert steps_to_target(curves, [4.0])["tokens_to_target"].isna().all()


def test_runs_without_measurements_stay_and_those_never_started_do_not(
    build,
):
    sweep = build()
    sweep.run((1, 16, 1))
    sweep.run((1, 32, 1), status="diverged", reason="loss is NaN", evaluated=False)
    sweep.run((1, 64, 1), status="pending")
    sweep.reject((4, 3, 1), 16, "cannot be cut")
    curves = curves_of(*loaded(sweep))
    silent = curves[curves["global_batch_size"].eq(32)]
    assert silent[["optimizer_step", "status"]].values.tolist() == [[0.0, "diverged"]]
    assert silent["loss"].isna().all()
    assert set(curves["global_batch_size"]) == {16, 32}
    assert steps_to_target(curves, [4.0])["outcome"].tolist() == ["reached", "diverged"]


def test_groups_are_what_differs_beside_batch_seed_and_rate(build):
    sweep = build()
    for batch in (16, 32):
        for rate in (1e-3, 3e-3):
            for width in (64, 128):
                sweep.run(
                    (1, batch, 1),
                    seed=batch + width,
                    optimizer__learning_rate=rate,
                    optimizer__weight_decay=1e-5 * batch * width,
                    model__d_model=width,
                )
    cells, tables = loaded(sweep)
    groups = curve_groups(cells)
    assert groups["model.d_model"].tolist() == ["64", "128"]
    assert groups["label"].tolist() == ["d model 64", "d model 128"]
    curves = curves_of(cells, tables)
    runs = curves.drop_duplicates("run")
    assert runs["group"].value_counts().to_dict() == {0: 4, 1: 4}
    assert runs.groupby("group")["learning_rate"].nunique().tolist() == [2, 2]


def test_one_group_has_no_name_and_hardware_makes_none(build):
    sweep = build()
    sweep.run((1, 16, 1), hardware="A")
    sweep.run((1, 32, 1), hardware="B")
    groups = curve_groups(loaded(sweep)[0])
    assert groups["label"].tolist() == [""]
    assert groups["cells"].tolist() == [(0, 1)]


@pytest.mark.slow
def test_a_model_that_follows_from_the_batch_is_still_another_model(
    build,
):
    sweep = build()
    sweep.run((1, 16, 1), model__d_model=64)
    sweep.run((1, 32, 1), model__d_model=128)
    assert len(curve_groups(loaded(sweep)[0])) == 2


def test_what_no_curve_can_be_made_of_is_refused(build):
    sweep = build()
    sweep.run((1, 16, 1), evaluated=False)
    cells, tables = loaded(sweep)
    with pytest.raises(AnalysisError, match="measured its held-out loss; set evaluation"):
        curves_of(cells, tables)
    other = build("other")
    other.run((1, 16, 1), status="pending")
    with pytest.raises(AnalysisError, match="no run was started: all 1"):
        curves_of(*loaded(other))


def test_a_step_that_was_measured_twice_counts_once(build):
    sweep = build()
    sweep.run((1, 16, 1))
    cells, tables = loaded(sweep)
    twice = pd.concat([tables.evals, tables.evals.iloc[[2]].assign(eval_loss=9.0)])
    doubled = replace(tables, evals=twice)
    once, again = curves_of(cells, tables), curves_of(cells, doubled)
    assert len(once) == len(again)
    assert again["loss"].tolist() == np.where(once.index == 2, 9.0, once["loss"]).tolist()
