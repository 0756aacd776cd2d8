"""Memory and step-time models and scaling: planted truths come back, and bad tables are refused."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.cost.memory_model import MEMORY_TERMS, fit_memory
from batchscape.analysis.cost.model import outside
from batchscape.analysis.cost.scaling import scaling_efficiency
from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.numbers import TIMES
from batchscape.errors import AnalysisError

FORK = [(1, 32, 1), (1, 8, 4), (2, 8, 2), (4, 8, 1)]
MANY = [*FORK, (2, 16, 1), (1, 4, 8), (4, 4, 2), (1, 16, 1), (1, 2, 1)]
MEMORY = (0.5, 0.02, 0.1, 0.07)
TIME = {"alpha": 2e-3, "beta": 3e-3, "exchange": 5e-3, "optimizer": 1.5e-3}


def table(cells, repeats=3, noise=0.0, rng=None, cell_noise=0.0):
    rng = rng or np.random.default_rng(0)

    def off(size):
        return math.exp(size * rng.standard_normal())

    rows = []
    for d, m, a in cells:
        shifts = [off(cell_noise) for _ in range(3)]
        for seed in range(repeats):
            both = [shift * off(noise) for shift in shifts]
            compute = a * (TIME["alpha"] + TIME["beta"] * m) * both[0]
            exchange = TIME["exchange"] * 2 * (d - 1) / d * both[1]
            update = TIME["optimizer"] * both[2]
            rows.append(
                {
                    "data_parallel_size": d,
                    "micro_batch_size": m,
                    "gradient_accumulation_steps": a,
                    "seed": seed,
                    "run_id": f"{d}-{m}-{a}-{seed}",
                    "peak_allocated_gib": np.dot(MEMORY, [1, m, a > 1, d > 1]),
                    "step_time_s": compute + exchange + update,
                    "exchange_s": exchange,
                    "optimizer_s": update,
                }
            )
    return pd.DataFrame(rows)


def test_memory_of_the_four_cuts_gives_all_four_terms_without_an_interval():
    phase = fit_memory(table(FORK)).phases["peak_allocated_gib"]
    estimates = [phase.estimates[name] for name in MEMORY_TERMS]
    assert [estimate.value for estimate in estimates] == pytest.approx(MEMORY)
    assert all(math.isnan(estimate.low) for estimate in estimates)
    assert "no more cells than terms" in estimates[0].note


def test_memory_of_more_cells_has_intervals_of_no_width_where_the_form_is_exact():
    model = fit_memory(table(MANY))
    slope = model.phases["peak_allocated_gib"].estimates["per_sample_gib"]
    assert (slope.low, slope.high) == pytest.approx((0.02, 0.02))
    assert slope.n == len(MANY)
    new = model.peak(2, 64, 2)
    assert new.high == pytest.approx(0.5 + 1.28 + 0.1 + 0.07)
    assert outside(model.measured, 2, 64, 2) == ["micro-batch 64 (measured: 2 to 32)"]
    assert outside(model.measured, 2, 8, 2) == []


def test_a_term_is_not_identified_where_its_factor_does_not_vary():
    cells = [(1, m, 1) for m in (1, 2, 4, 8)]
    phase = fit_memory(table(cells)).phases["peak_allocated_gib"]
    assert not phase.estimates["accumulation_gib"].is_identified
    assert "accumulation" in phase.estimates["accumulation_gib"].note
    assert not phase.at(1, 4, 2).is_identified
    assert phase.at(1, 3, 1).value == pytest.approx(0.56)
    one = fit_memory(table([(1, 8, 1), (1, 8, 2)])).phases["peak_allocated_gib"]
    assert not one.estimates["per_sample_gib"].is_identified
    assert "one micro-batch" in one.estimates["per_sample_gib"].note


def test_the_peak_is_that_of_the_phase_that_needs_most():
    rows = table(MANY).drop(columns="peak_allocated_gib")
    rows["peak_allocated_first_optimizer_step_gib"] = 1.0
    rows["peak_allocated_steady_gib"] = 0.2 + 0.1 * rows["micro_batch_size"]
    model = fit_memory(rows)
    assert model.peak(1, 4, 1).value == pytest.approx(1.0)
    assert model.peak(1, 16, 1).value == pytest.approx(1.8)
    assert fit_memory(rows.assign(device_used_gib=9.0)).limiting == ["device_used_gib"]


@pytest.mark.parametrize("apart", [True, False])
def test_step_time_terms_come_back(apart):
    # Global batches differ, without which time a sample and exchange cannot be told apart.
    rows = table([*MANY, (2, 4, 1), (4, 16, 4)])
    rows = rows if apart else rows.drop(columns=["exchange_s", "optimizer_s"])
    model = fit_step_time(rows)
    values = [model.estimates[n].value for n in ("micro_step_fixed_s", "per_sample_s")]
    assert values == pytest.approx([TIME["alpha"], TIME["beta"]])
    assert model.estimates["exchange_s"].value == pytest.approx(TIME["exchange"])
    assert model.estimates["optimizer_s"].value == pytest.approx(TIME["optimizer"])
    new = model.at(2, 64, 3)
    assert new.value == pytest.approx(3 * (2e-3 + 3e-3 * 64) + 5e-3 + 1.5e-3)
    np.testing.assert_allclose(model.cells["fitted"], model.cells["measured"], rtol=1e-9)


def test_rows_may_have_any_index_and_runs_any_name():
    halves = [table(MANY, repeats=2), table(MANY, repeats=2).assign(seed=2)]
    rows = pd.concat(halves)
    rows["run_id"] = range(len(rows))
    model = fit_step_time(rows)
    whole = fit_step_time(pd.concat(halves, ignore_index=True))
    assert model.at(2, 8, 2).value == pytest.approx(whole.at(2, 8, 2).value)
    assert sum(names.count(";") + 1 for names in model.cells["run_ids"]) == len(rows)
    assert fit_memory(rows).phases["peak_allocated_gib"].cells["n"].sum() == len(rows)


def test_one_global_batch_does_not_tell_exchange_from_time_a_sample():
    rows = table([*FORK, (2, 16, 1), (1, 4, 8)]).drop(columns=["exchange_s", "optimizer_s"])
    model = fit_step_time(rows)
    assert not model.estimates["exchange_s"].is_identified
    assert "together" in model.estimates["exchange_s"].note
    assert model.at(2, 4, 4).value == pytest.approx(4 * (2e-3 + 12e-3) + 6.5e-3)


def test_no_exchange_is_predicted_from_one_device():
    model = fit_step_time(table([(1, m, 1) for m in (1, 2, 4)]))
    assert not model.estimates["exchange_s"].is_identified
    assert "one device" in model.estimates["exchange_s"].note
    assert not model.at(2, 4, 1).is_identified
    assert model.at(1, 4, 1).is_identified


def test_an_interval_does_not_reach_below_zero_and_a_negative_value_says_so():
    rows = table([(1, m, 1) for m in (1, 2, 4, 8)])
    rows["step_time_s"] = 3e-3 * rows["micro_batch_size"] ** 1.5 + rows["optimizer_s"]
    fixed = fit_step_time(rows).estimates["micro_step_fixed_s"]
    assert fixed.value == 0
    assert fixed.low == 0
    assert "negative" in fixed.note


def rough(times):
    """One run a micro-batch, whose times follow no line."""
    return pd.DataFrame(
        {
            "data_parallel_size": 1,
            "micro_batch_size": [2**power for power in range(len(times))],
            "gradient_accumulation_steps": 1,
            "step_time_s": times,
        }
    )


def test_a_time_that_is_open_by_more_than_ten_times_is_not_known():
    """A line through three cells by least squares of relative errors, repeated here in NumPy.

    A cell that was not measured departs from the line as the others do.
    """
    times = np.array([1.0, 2.5, 2.6])
    model = fit_step_time(rough(times))
    estimate = model.at(1, 16, 1)
    line, size = np.column_stack([np.ones(3), [1, 2, 4]]), times
    for _ in range(100):
        design = line / size[:, None]
        coefficients, squares, *_ = np.linalg.lstsq(design, times / size)
        size = line @ coefficients
    weights = np.array([1.0, 16.0])
    value = weights @ coefficients
    variance = squares[0] * (weights @ np.linalg.inv(design.T @ design) @ weights + value**2)
    reach = stats.t.ppf(0.975, 1) * math.sqrt(variance) / value
    assert not estimate.is_identified
    assert math.log(estimate.high / estimate.low) == pytest.approx(2 * reach, rel=1e-3)
    assert estimate.note.endswith("times apart; a run of 1 x 16 x 1 would tell")
    assert "not identified: its interval has ends" in estimate.note


def test_no_step_takes_no_time():
    estimate = fit_step_time(rough(np.array([8.0, 4.0, 2.0]))).at(1, 16, 1)
    assert not estimate.is_identified
    assert estimate.note.endswith("s, and no step takes none; a run of 1 x 16 x 1 would tell")


def test_a_time_that_is_open_by_less_is_known():
    model = fit_step_time(rough(np.array([1.0, 2.02, 4.0, 7.95])))
    estimate = model.at(1, 16, 1)
    assert estimate.is_identified
    assert estimate.high < 10 * estimate.low


def test_an_invalid_time_is_left_out_and_none_at_all_is_refused():
    rows = table(MANY)
    rows.loc[rows["micro_batch_size"] == 32, "step_time_s"] = math.nan
    assert 32 not in set(fit_step_time(rows).cells["micro_batch_size"])
    with pytest.raises(AnalysisError, match="no run has a valid time"):
        fit_step_time(rows.assign(step_time_s=math.nan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="micro_batch_size"), "needs the columns micro_batch_size"),
        (
            lambda t: t.drop(columns=["peak_allocated_gib", "step_time_s"]),
            "columns step_time_s|no run has a memory",
        ),
        (lambda t: t.assign(micro_batch_size=1.5), "micro_batch_size is a whole number"),
        (lambda t: t.assign(peak_allocated_gib=-1.0, step_time_s=-1.0), "is a finite number"),
        (lambda t: t.assign(group=range(len(t))), "mixes"),
    ],
)
def test_a_bad_table_is_refused_with_the_rule(change, message):
    for fit in (fit_memory, fit_step_time):
        with pytest.raises(AnalysisError, match=message):
            fit(change(table(FORK)))


def test_scaling_efficiencies_are_ratios_of_paired_times():
    rows = table([(1, 8, 1), (2, 8, 1), (4, 8, 1), (1, 32, 1)], noise=0.05)
    efficiencies = scaling_efficiency(rows).set_index(["kind", "devices"])

    def times(cell):
        return rows[rows["run_id"].str.startswith(cell)].set_index("seed")["step_time_s"]

    logs = np.log(times("1-8-1") / times("4-8-1"))
    weak = efficiencies.loc[("weak", 4)]
    assert weak["efficiency"] == pytest.approx(np.exp(logs.mean()))
    half = 4.302652729911275 * logs.std() / np.sqrt(3)  # t of 2 degrees
    assert weak["low"] == pytest.approx(np.exp(logs.mean() - half))
    assert weak["n"] == 3
    strong = efficiencies.loc[("strong", 4)]
    assert strong["reference"] == TIMES.join(["1", "32", "1"])
    expected = np.exp(np.log(times("1-32-1") / times("4-8-1") / 4).mean())
    assert strong["efficiency"] == pytest.approx(expected)


def test_scaling_pairs_by_seed_only_and_one_device_gives_nothing():
    rows = table([(1, 8, 1), (2, 8, 1)])
    apart = rows[(rows["data_parallel_size"] == 1) | (rows["seed"] > 1)]
    assert scaling_efficiency(apart)["n"].to_list() == [1]
    never = rows.assign(seed=rows["seed"] + 10 * rows["data_parallel_size"])
    assert scaling_efficiency(never).empty
    assert scaling_efficiency(table([(1, 8, 1), (1, 8, 2)])).empty


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16)),
        min_size=1,
        max_size=8,
        unique=True,
    ),
    st.booleans(),
)
@pytest.mark.slow
def test_whatever_the_cells_a_prediction_is_right_or_absent(cells, apart):
    rows = table(cells, repeats=1)
    rows = rows if apart else rows.drop(columns=["exchange_s", "optimizer_s"])
    model = fit_step_time(rows)
    for devices, micro, accumulation in [*cells, (2, 5, 3)]:
        truth = accumulation * (TIME["alpha"] + TIME["beta"] * micro) + TIME["optimizer"]
        truth += TIME["exchange"] * 2 * (devices - 1) / devices
        estimate = model.at(devices, micro, accumulation)
        if estimate.is_identified:
            assert estimate.value == pytest.approx(truth, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repeats", "noise"),
    [(3, (0.05, 0.02)), (3, (0.0, 0.03))],
    ids=["cells depart-3", "runs only-3"],
)
def test_intervals_cover_the_truth(repeats, noise):
    rng = np.random.default_rng(7)
    names = dict(zip(("micro_step_fixed_s", "per_sample_s"), ("alpha", "beta"), strict=True))
    names |= {"exchange_s": "exchange", "optimizer_s": "optimizer"}
    hits = {name: [] for name in names}
    for _ in range(200):
        rows = table(MANY, repeats, noise[1], rng, noise[0])
        estimates = fit_step_time(rows).estimates
        for name, truth in names.items():
            hits[name].append(estimates[name].low <= TIME[truth] <= estimates[name].high)
    for name, covered in hits.items():
        assert 0.90 <= np.mean(covered) <= 0.99, (name, np.mean(covered))


def test_a_term_that_is_surely_negative_is_not_a_certain_zero():
    rows = [(1, m, a, 1 + 0.01 * m - 0.1 * (a > 1) + 1e-4 * (m == 16)) for m in (8, 16, 32)
            for a in (1, 4)]  # fmt: skip
    columns = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]
    columns.append("peak_allocated_gib")
    phase = fit_memory(pd.DataFrame(rows, columns=columns)).phases["peak_allocated_gib"]
    estimate = phase.estimates["accumulation_gib"]
    assert not estimate.is_identified
    assert "below zero" in estimate.note


def test_what_shards_save_is_negative():
    rows = table(MANY)
    rows["peak_allocated_gib"] -= 0.3 * (rows["data_parallel_size"] > 1)
    phase = fit_memory(rows, is_sharded=True).phases["peak_allocated_gib"]
    saved = phase.estimates["devices_gib"]
    assert (saved.value, saved.low, saved.high) == pytest.approx((0.07 - 0.3,) * 3)
    # Copies save nothing: a negative term means that the form does not hold.
    copies = fit_memory(rows).phases["peak_allocated_gib"].estimates["devices_gib"]
    assert not copies.is_identified
