"""Paired differences, against what a test writes by hand."""

import pandas as pd

from batchscape.analysis.comparing.pairs import contrasts_of


def test_pairs_are_of_equal_seed_and_all_else_equal():
    steps, micros = "gradient_accumulation_steps", "micro_batch_size"
    rows = [
        {
            "block": f"{seed}",
            "run_id": f"{seed}-{a}-{m}",
            "data_parallel_size": 1,
            steps: a,
            micros: m,
            "value": 10 * seed + a + m,
        }
        for seed in range(3)
        for a in (1, 2, 4)
        for m in (8, 16)
        if (seed, a) != (2, 4)
    ]
    table = pd.DataFrame(rows)
    held = ["data_parallel_size", micros]
    contrasts = {one.name: one for one in contrasts_of(table, steps, held, "block")}
    places = [f"(devices 1, micro {m})" for m in (8, 16)]
    assert list(contrasts) == [f"accumulation {a} against 1 {p}" for p in places for a in (2, 4)]
    contrast = contrasts[f"accumulation 4 against 1 {places[0]}"]
    assert contrast.values.tolist() == [3.0, 3.0]
    assert contrast.run_ids == ("0-1-8", "0-4-8", "1-1-8", "1-4-8")
    assert (contrast.place, contrast.level, contrast.base) == ((1, 8), 4, 1)
    alone = contrasts_of(table, steps, held, "block", lambda levels: [(levels[0], None)])
    assert [one.name for one in alone] == [f"accumulation 1 {place}" for place in places]
    assert alone[0].values.tolist() == [9.0, 19.0, 29.0]


def test_levels_that_share_no_unit_have_no_values():
    table = pd.DataFrame({"block": ["0", "1"], "run_id": ["a", "b"], "x": [1, 2], "value": [1, 2]})
    (contrast,) = contrasts_of(table, "x", [], "block")
    assert (contrast.name, contrast.run_ids, len(contrast.values)) == ("x 2 against 1", (), 0)


def test_a_run_without_a_value_is_behind_no_pair():
    rows = [("0", "a", 1, 1.0), ("0", "b", 2, 3.0), ("0", "c", 2, None), ("0", "d", 4, None)]
    table = pd.DataFrame(rows, columns=["block", "run_id", "x", "value"])
    contrasts = contrasts_of(table, "x", [], "block")
    assert [(one.level, one.values.tolist(), one.run_ids) for one in contrasts] == [
        (2, [2.0], ("a", "b")),
        (4, [], ()),
    ]
