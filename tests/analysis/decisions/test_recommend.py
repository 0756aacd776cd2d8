"""Recommendations: the planted best geometry is chosen, and what is not known is said."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.cells import find_cells
from batchscape.analysis.cost.topic import cost_section
from batchscape.analysis.decisions.candidates import candidates_of
from batchscape.analysis.decisions.config_files import config_values
from batchscape.analysis.decisions.evidence import Basis, gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.analysis.decisions.topic import decision_section
from batchscape.cli import main
from batchscape.errors import AnalysisError
from batchscape.geometry import BatchGeometry
from batchscape.record.tables import load

CELLS = [(1, 8, 4), (1, 16, 2), (1, 32, 1), (2, 8, 2), (2, 16, 1), (2, 16, 4), (2, 32, 2)]
STEPS = {32: [100.0, 104.0, 98.0], 128: [60.0, 61.0, 58.0]}


def step_time(d, m, a):
    return a * (2e-3 + 3e-3 * m) + 4e-3 * 2 * (d - 1) / d + 1e-3


def evidence(cells=CELLS, steps=None, noise=0.002, **changes):
    rng = np.random.default_rng(5)
    rows = [
        {
            "group": 0,
            "data_parallel_size": d,
            "micro_batch_size": m,
            "gradient_accumulation_steps": a,
            "global_batch_size": d * m * a,
            "seed": seed,
            "run_id": f"{d}-{m}-{a}-{seed}",
            "peak_allocated_gib": 1 + 0.1 * m + 0.2 * (a > 1) + 0.3 * (d > 1),
            "step_time_s": step_time(d, m, a) * math.exp(noise * rng.standard_normal()),
        }
        for d, m, a in cells
        for seed in range(3)
    ]
    reaches = pd.DataFrame(
        [
            {
                "global_batch_size": batch,
                "seed": seed,
                "steps_to_target": taken,
                "target_loss": 2.5,
                "learning_rate": 1e-3,
                "tuned": False,
                "edge": False,
            }
            for batch, all_steps in (STEPS if steps is None else steps).items()
            for seed, taken in enumerate(all_steps)
        ]
    )
    fields = {"label": "", "table": pd.DataFrame(rows), "reaches": reaches, "optimizer": "adamw"}
    return Basis(**fields | changes)


def test_the_fastest_measured_geometry_is_chosen():
    recommendation = recommend(evidence(), Needs(memory_gib=80.0))
    times = {
        cell: np.exp(np.log(STEPS[math.prod(cell)]).mean()) * step_time(*cell) for cell in CELLS
    }
    assert recommendation.geometry == min(times, key=times.get) == (2, 16, 1)
    assert recommendation.chosen["time_s"] == pytest.approx(times[2, 16, 1], rel=0.01)
    front = recommendation.candidates[recommendation.candidates["on_front"]]
    assert set(front["data_parallel_size"]) == {1, 2}


def test_of_cuts_that_nothing_tells_apart_the_largest_micro_batch_is_taken():
    recommendation = recommend(evidence([(1, 8, 4), (1, 16, 2), (1, 32, 1)], noise=0.3), Needs())
    assert recommendation.geometry == (1, 32, 1)


def test_a_device_too_small_for_the_best_gets_what_fits():
    recommendation = recommend(evidence(), Needs(memory_gib=2.6))
    # (2, 16, 1) needs 1 + 1.6 + 0.3 = 2.9 GiB, and ten per cent.
    assert recommendation.geometry == (2, 8, 2)
    assert recommendation.chosen["memory_gib"] == pytest.approx(2.3 * 1.1)
    with pytest.raises(AnalysisError, match=r"no geometry fits a device of 0\.5 GiB"):
        recommend(evidence(), Needs(memory_gib=0.5))


def test_what_ran_out_of_memory_is_not_recommended():
    recommendation = recommend(evidence(out_of_memory=[(1, 16, 1)]), Needs())
    assert recommendation.geometry[1] < 16


def test_shards_that_ran_out_of_memory_tell_of_fewer_devices_and_copies_of_more():
    def devices_of(failed, **changes):
        basis = evidence(out_of_memory=[(failed, 1, 1)], **changes)
        return set(candidates_of(basis, 2).query("fits")["data_parallel_size"])

    assert devices_of(1) == set()
    assert devices_of(2) == {1}
    assert devices_of(1, is_sharded=True) == {2}
    assert devices_of(2, is_sharded=True) == set()


@pytest.mark.parametrize(
    ("engine", "is_sharded"),
    [
        ({"name": "ddp"}, False),
        ({"name": "fsdp"}, True),
        ({"name": "deepspeed", "zero_stage": 0}, False),
        ({"name": "deepspeed", "zero_stage": 1}, True),
    ],
    ids=str,
)
def test_what_an_engine_shards_is_known(build, engine, is_sharded):
    sweep = build()
    sweep.run((1, 8, 4), engine=engine)
    (basis,) = gather([sweep.path])
    assert basis.is_sharded == is_sharded


def test_a_cut_that_is_predicted_to_be_faster_is_named_with_its_command():
    cells = [(1, 8, 4), (1, 16, 2), (1, 32, 1), (2, 8, 2), (2, 8, 8)]
    plain = evidence(cells)
    runs = plain.table.assign(
        **{
            "trajectory_id": plain.table["run_id"],
            "status": "completed",
            "timing_valid": True,
            "timing_note": None,
            "sweep_dir": "out/mine",
            "launch.command": "batchscape sweep sweeps=mine batch.global_batch_size=32,128",
            "optimizer.learning_rate": 0.002,
            "cell": 0,
        }
    )
    of_batch = {32: "2-8-2-0", 128: "2-8-8-0"}
    reaches = plain.reaches.assign(run_id=plain.reaches["global_batch_size"].map(of_batch))
    recommendation = recommend(
        evidence(cells, runs=runs, reaches=reaches, same_sweeps=runs), Needs()
    )
    guesses = recommendation.candidates[recommendation.candidates["source"].eq("predicted")]
    (row,) = guesses.nsmallest(1, "time_s").to_dict("records")
    assert row["times_slower"] < 1
    cut = [int(row[name]) for name in ("data_parallel_size", "micro_batch_size")]
    assert cut == [2, 16]
    assert recommendation.missing[0].endswith(
        "To measure it: batchscape sweep sweeps=mine batch.data_parallel_size=2 "
        "batch.micro_batch_size=16 batch.gradient_accumulation_steps=1 batch.global_batch_size=32 "
        "optimizer.learning_rate=0.002 sweep_dir=out/mine"
    )
    packed = runs["micro_batch_size"].eq(32)
    note = runs["timing_note"].mask(packed, "2 runs at the same time")
    disturbed = runs.assign(timing_valid=~packed, timing_note=note, cell=runs["micro_batch_size"])
    made = evidence(cells, runs=disturbed, reaches=reaches, same_sweeps=runs)
    (untimed,) = [text for text in recommend(made, Needs()).missing if "the time of 1 cut" in text]
    assert "Times of 3 of 15 completed runs do not count: 2 runs at the same time (3)." in untimed
    assert untimed.endswith("timing_repeat=1 sweep_dir=out/mine")


def test_a_deadline_takes_the_cheapest_that_meets_it():
    rows = candidates_of(evidence(), 2, math.nan)
    one = rows[rows["source"].eq("measured") & rows["data_parallel_size"].eq(1)]
    relaxed = recommend(evidence(), Needs(deadline_s=float(one["time_high_s"].max()) * 1.01))
    assert relaxed.geometry[0] == 1
    tight = recommend(evidence(), Needs(deadline_s=float(one["time_low_s"].min()) * 0.9))
    assert tight.geometry[0] == 2
    never = recommend(evidence(), Needs(deadline_s=1e-3))
    assert any("SURE TO MEET THE DEADLINE" in text for text in never.warnings)


def test_a_deadline_takes_a_cheaper_cut_timed_once_if_its_time_may_spread_so_far():
    """The other cut, three times as slow, has an interval, whose reach is that of one run."""
    basis = untimed(
        evidence([(1, 1, 32), (1, 32, 1)], steps={32: STEPS[32]}, noise=0.02),
        lambda table: table["micro_batch_size"].eq(32) & table["seed"].gt(0),
    )
    rows = candidates_of(basis, 1).set_index("micro_batch_size")
    slow, fast = rows.loc[1], rows.loc[32]
    assert math.isnan(fast["time_high_s"])
    end = fast["time_s"] * (slow["time_high_s"] / slow["time_s"]) ** math.sqrt(3)
    assert end < slow["time_s"]
    relaxed = recommend(basis, Needs(deadline_s=1.01 * slow["time_high_s"]))
    assert relaxed.geometry == (1, 32, 1)
    assert "was the cheapest within the deadline in its 1 run, to reach" in relaxed.headline
    assert any("if it spreads as widely as any that has one" in text for text in relaxed.reasons)
    (warning,) = [text for text in relaxed.warnings if "deadline" in text]
    assert warning.startswith(
        "1 x 32 x 1 is not sure to meet the deadline: its time has no interval (n = 1). The "
        "cheapest that is sure to is 1 x 1 x 32, with"
    )
    # It alone meets this one.
    alone = recommend(basis, Needs(deadline_s=1.001 * end))
    assert alone.geometry == (1, 32, 1)
    assert not any("The cheapest that is sure" in text for text in alone.warnings)
    tight = recommend(basis, Needs(deadline_s=0.999 * end))
    assert any("SURE TO MEET THE DEADLINE" in text for text in tight.warnings)


def test_a_cheaper_cut_timed_once_that_may_miss_the_deadline_is_named():
    """Two devices meet it and have an interval; one is cheaper, and hardly in time."""
    basis = untimed(
        evidence([(1, 32, 1), (2, 16, 1)], steps={32: STEPS[32]}, noise=0.02),
        lambda table: table["micro_batch_size"].eq(32) & table["seed"].gt(0),
    )
    one = candidates_of(basis, 1).set_index("micro_batch_size").loc[32]
    recommendation = recommend(basis, Needs(deadline_s=1.001 * one["time_s"]))
    assert recommendation.geometry == (2, 16, 1)
    (warning,) = [text for text in recommendation.warnings if "deadline" in text]
    assert warning.startswith("1 x 32 x 1 may take fewer device-hours, but its time of ")
    assert "(n = 1) has no interval" in warning
    assert not any("deadline" in text for text in recommend(basis, Needs()).warnings)


def test_a_deadline_says_what_decided():
    tied = recommend(
        evidence([(1, 8, 4), (1, 16, 2), (1, 32, 1)], noise=0.3), Needs(deadline_s=1e5)
    )
    assert tied.geometry == (1, 32, 1)
    assert tied.reasons[-1].endswith("cuts that nothing tells from the cheapest.")
    rows = tied.candidates[tied.candidates["source"].eq("measured")]
    assert tied.chosen["device_hours"] > rows["device_hours"].min()
    steps = {32: [100, 104, 98], 64: [80, 81, 79], 128: [60, 61, 58]}
    large = evidence([(1, 16, 2), (1, 32, 1), (1, 64, 2), (2, 32, 1), (2, 64, 1)], steps=steps)
    beyond = recommend(large, Needs(memory_gib=2.6, deadline_s=1e5))
    assert beyond.chosen["source"] == "predicted"


def test_no_geometry_is_named_without_a_valid_step_time():
    basis = evidence([(1, 1, 2), (1, 2, 2)], steps={2: [100.0, 101.0], 4: [90.0, 91.0]})
    table = basis.table.drop(columns="peak_allocated_gib").assign(step_time_s=math.nan)
    basis = evidence(table=table, reaches=basis.reaches)
    recommendation = recommend(basis, Needs(memory_gib=1.0, deadline_s=60.0))
    assert recommendation.chosen is None
    assert recommendation.geometry is None
    assert recommendation.why_not.startswith(
        "not identified: fewer than two geometries that fit have a valid time"
    )
    assert any("the time of a step" in text for text in recommendation.missing)
    assert recommendation.config == {}
    written = json.loads(json.dumps(recommendation.as_mapping(), allow_nan=False))
    assert written["geometry"] is None
    assert written["not_identified"] == recommendation.why_not
    assert written["candidates"] == []


def test_no_batch_that_reached_the_target_names_no_geometry():
    recommendation = recommend(evidence(steps={32: [math.inf] * 3}), Needs())
    assert recommendation.geometry is None
    assert "in no global batch most runs reached a target." in recommendation.why_not


def test_what_ran_out_of_memory_may_run_on_a_device_with_more():
    basis = evidence(out_of_memory=[(1, 16, 1)], host_memory_gib=4.0)
    assert recommend(basis, Needs(memory_gib=4.0)).geometry[1] < 16
    assert recommend(basis, Needs(memory_gib=80.0)).geometry == (2, 16, 1)
    # How much the device had is not known: the failure counts.
    unknown = recommend(evidence(out_of_memory=[(1, 16, 1)]), Needs(memory_gib=80.0))
    assert unknown.geometry[1] < 16


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_a_deadline_that_is_not_sure_to_be_met_gives_no_time_away(noise):
    basis = evidence([(1, 8, 4), (1, 16, 2), (1, 32, 1)], noise=noise)
    rows = recommend(basis, Needs()).candidates
    fastest = float(rows.loc[rows["source"] == "measured", "time_s"].min())
    assert recommend(basis, Needs()).chosen["time_s"] > fastest
    for deadline in (fastest * 1.0001, fastest * 0.9):
        recommendation = recommend(basis, Needs(deadline_s=deadline))
        assert recommendation.chosen["time_s"] == fastest
        assert any("SURE TO MEET THE DEADLINE" in text for text in recommendation.warnings)


def test_ranks_on_a_processor_share_its_memory_each_geometry_by_its_own_number():
    # (2, 16, 1) needs 3.19 GiB on each of two, whatever number of devices there is.
    recommendation = recommend(evidence(host_memory_gib=6.5), Needs(devices=64))
    assert recommendation.geometry == (2, 16, 1)
    assert "of 3.25 GiB" in recommendation.reasons[0]
    assert recommend(evidence(host_memory_gib=6.3), Needs()).geometry != (2, 16, 1)


def test_where_all_ran_out_of_memory_these_are_named():
    with pytest.raises(AnalysisError, match=r"ran out of memory \(1 x 1 x 1\)"):
        recommend(evidence(out_of_memory=[(1, 1, 1)]), Needs())


def test_more_devices_than_measured_are_predicted_flagged_and_not_chosen():
    recommendation = recommend(evidence(), Needs(devices=4))
    assert recommendation.geometry[0] <= 2
    assert any("nothing was measured on more than 2" in text for text in recommendation.warnings)
    four = recommendation.candidates[recommendation.candidates["data_parallel_size"] == 4]
    assert (four["beyond"] != "").all()
    assert (four["source"] == "predicted").all()
    one = recommend(evidence(), Needs(devices=1))
    assert one.geometry[0] == 1


def test_the_regret_is_the_end_of_the_interval_of_the_ratio():
    recommendation = recommend(evidence(noise=0.2), Needs())
    chosen = (recommendation.candidates[["data_parallel_size", "micro_batch_size"]] == [
        recommendation.geometry[0], recommendation.geometry[1]]).all(axis=1)  # fmt: skip
    others = recommendation.candidates[
        (recommendation.candidates["source"] == "measured") & ~chosen
    ]
    lost = 100 * (1 - others["times_slower_low"].min())
    assert f"at most {lost:.2g} %" in recommendation.regret[0]


def test_a_batch_that_no_seed_brought_to_the_target_is_not_preferred():
    steps = {32: [100.0, 104.0, 98.0], 128: [math.nan, 1.0, math.inf]}
    recommendation = recommend(evidence(steps=steps), Needs())
    assert recommendation.chosen["global_batch_size"] == 32
    rows = recommendation.candidates.set_index("global_batch_size")
    assert np.isinf(rows.loc[128, "time_s"].dropna()).all()


def test_without_a_target_there_is_still_an_answer():
    recommendation = recommend(evidence(reaches=None), Needs(deadline_s=60.0))
    assert math.prod(recommendation.geometry) == 32
    assert recommendation.costliest[0].endswith(" times as long a step.")
    assert any("SURE TO MEET THE DEADLINE" in text for text in recommendation.warnings)


@pytest.mark.parametrize(
    "needs", [{"devices": 0}, {"memory_gib": -1.0}, {"deadline_s": math.inf}, {"memory_gib": 0.0}]
)
def test_impossible_needs_are_refused(needs):
    with pytest.raises(AnalysisError, match=next(iter(needs))):
        Needs(**needs)


def test_config_files_count_devices_of_a_node_or_of_all():
    values = config_values(BatchGeometry(2, 8, 7, 2))
    assert values["accelerate"]["num_machines"] == values["torchrun"]["nnodes"] == 2
    assert values["accelerate"]["num_processes"] == 16
    assert values["torchrun"]["nproc_per_node"] == values["LitGPT"]["devices"] == 8
    assert values["LitGPT"]["train.global_batch_size"] == 224
    assert values["DeepSpeed JSON"] == {
        "train_batch_size": 224,
        "train_micro_batch_size_per_gpu": 7,
        "gradient_accumulation_steps": 2,
    }


@pytest.mark.slow
def test_the_verb_prints_and_writes_json(build, capsys):
    folder = build().fork().path
    assert main(["recommend", str(folder)]) == 0
    text = capsys.readouterr().out
    for part in (
        "Use ",
        "Why",
        "wrong",
        "train_micro_batch_size_per_gpu",
    ):
        assert part in text
    assert main(["recommend", str(folder), "--json", "--devices", "1", "--deadline", "2h"]) == 0
    (entries,) = json.loads(capsys.readouterr().out)
    assert entries["geometry"]["data_parallel_size"] == 1
    assert entries["candidates"][0]["time_s"] > 0


def test_the_verb_refuses_bad_input_with_a_message(build, capsys, tmp_path):
    folder = str(build().fork((0,)).path)
    for arguments in (["--deadline", "soon"], ["--memory-gib", "-3"], ["--target", "nan"]):
        assert main(["recommend", folder, *arguments]) == 2
        assert capsys.readouterr().err
    assert main(["recommend", str(tmp_path / "absent")]) == 2
    rejected = build("rejected")
    rejected.reject((2, 32, None), 32, "cannot be cut")
    assert main(["recommend", str(rejected.path)]) == 2
    assert "completed runs" in capsys.readouterr().err


@pytest.mark.slow
def test_two_machines_get_a_recommendation_each(build):
    sweep = build()
    for seed in (0, 1):
        sweep.run((1, 8, 4), seed=seed)
        sweep.run((1, 32, 1), seed=seed, hardware="Another CPU")
    bases = gather([sweep.path])
    assert [each.label.split()[1] for each in bases] == ["Another", "Example"]
    assert {recommend(each, Needs()).geometry for each in bases} == {(1, 8, 4), (1, 32, 1)}


def test_there_is_no_section_without_a_completed_run(build):
    sweep = build()
    sweep.run(status="oom", reason="out of memory")
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    assert cost_section(cells) is None
    assert decision_section(cells, tables) is None


def test_the_headline_names_what_the_runs_do_not_tell_apart():
    two = recommend(evidence([(1, 16, 2), (1, 32, 1)], noise=0.02), Needs()).headline
    assert two.endswith("these runs do not tell its time from that of 1 x 16 x 2.")
    alone = recommend(evidence([(1, 8, 4)], steps={32: STEPS[32]}), Needs()).headline
    assert "no other geometry that fits has a valid time to the target to compare" in alone


def test_the_only_cut_with_a_time_is_not_chosen_among_those_without():
    made = evidence([(1, 8, 4), (1, 16, 2), (1, 32, 1)], steps={32: STEPS[32]})

    def timed(*micro):
        busy = ~made.table["micro_batch_size"].isin(micro)
        table = made.table.assign(step_time_s=made.table["step_time_s"].mask(busy))
        return recommend(replace(made, table=table), Needs())

    recommendation = timed(16)
    assert recommendation.geometry is None
    assert recommendation.why_not.startswith(
        "not identified: fewer than two geometries that fit have a valid time"
    )
    assert timed(16, 32).geometry == (1, 32, 1)


def test_cuts_of_a_program_take_their_own_steps_and_none_is_derived():
    """The second cut needs 1.5 times the steps, by seed; the third never ran."""
    cuts = [(1, 8, 4), (2, 8, 2)]
    made = evidence(cuts, noise=1e-6)
    rows = [
        {"data_parallel_size": d, "micro_batch_size": m, "gradient_accumulation_steps": a}
        | {
            "global_batch_size": 32,
            "seed": seed,
            "trajectory_id": f"t{seed}",
            "run_id": f"{d}{seed}",
        }
        | {"steps_to_target": steps * d**0.585, "target_loss": 2.5, "learning_rate": 1e-3}
        | {"tuned": False, "edge": False}
        for d, m, a in cuts
        for seed, steps in enumerate((100.0, 150.0, 80.0))
    ]
    recommendation = recommend(
        replace(made, reaches=pd.DataFrame(rows), is_program=True), Needs(devices=2)
    )
    table = recommendation.candidates.set_index("data_parallel_size")
    assert sorted(table.index) == [1, 2], "a cut that did not run has no steps"
    assert recommendation.geometry == (2, 8, 2)
    expected = 2**-0.585 * step_time(1, 8, 4) / step_time(2, 8, 2)
    one = table.loc[1]
    assert one["times_slower"] == pytest.approx(expected, rel=1e-4)
    # Seeds differ by a factor of two and are paired: the ratio is known to the noise of the times.
    assert one["times_slower_high"] / one["times_slower_low"] < 1.001


def test_two_seeds_have_no_interval_anywhere():
    """Student's t of one degree would end far out; of many times, Satterthwaite's hide it."""
    made = evidence(steps={32: [100.0, 150.0], 128: [60.0, 61.0]}, noise=0.2)
    recommendation = recommend(made, Needs())
    chosen = recommendation.chosen
    assert math.isnan(chosen["time_high_s"])
    # An end that meets the deadline promises no more.
    for times in (1.01, 1e6):
        late = recommend(made, Needs(deadline_s=times * chosen["time_s"]))
        assert any("SURE TO MEET THE DEADLINE" in text for text in late.warnings)
    assert "[" not in recommendation.reasons[-1]
    rows = recommendation.candidates
    other = rows["global_batch_size"].ne(chosen["global_batch_size"])
    ends = ["times_slower_low", "times_slower_high"]
    assert rows.loc[other, ends].isna().all(axis=None)
    # Of cuts of one batch the steps cancel, and three times tell their ratio.
    same = rows.loc[~other & rows["source"].eq("measured"), ends]
    assert same.notna().all(axis=None)
    (open_,) = [text for text in recommendation.missing if "between seeds" in text]
    assert "how steps vary between seeds: too few seeds (n = 2; 3 needed)" in open_


def test_one_global_batch_has_nothing_that_a_learning_rate_could_favour(build):
    sweep = build()
    for seed in (0, 1, 2):
        for cut in [(1, 8, 4), (1, 32, 1)]:
            sweep.run(cut, seed=seed)
    (basis,) = gather([sweep.path])
    assert basis.reaches is not None
    assert not any("UNTUNED" in text for text in basis.warnings)
    for seed in (0, 1, 2):
        sweep.run((1, 8, 1), seed=seed)
    assert any("UNTUNED" in text for basis in gather([sweep.path]) for text in basis.warnings)


def test_two_times_quote_no_end_and_say_what_three_would_settle():
    """Two seeds of cuts whose steps cancel: their ratio has one degree of freedom."""
    made = evidence([(1, 8, 4), (1, 16, 2), (1, 32, 1)], steps={32: STEPS[32][:2]}, noise=0.2)
    table = made.table[made.table["seed"].lt(2)]
    recommendation = recommend(replace(made, table=table), Needs())
    assert recommendation.regret[0].startswith("Not identified: what a wrong choice would cost")
    assert "(n = 2) times as long" in recommendation.costliest[0]
    measured = recommendation.candidates[recommendation.candidates["source"].eq("measured")]
    assert recommendation.chosen["time_s"] == measured["time_s"].min()
    carried = recommendation.as_mapping()
    assert carried["time_high_s"] is None
    assert all(row["times_slower_low"] in {None, 1.0} for row in carried["candidates"])


def untimed(made, is_untimed):
    """The evidence without the times of some runs."""
    times = made.table["step_time_s"].mask(is_untimed(made.table))
    return replace(made, table=made.table.assign(step_time_s=times))


def of_one_seed(made):
    """The evidence of the first seed, with runs whose command is known."""
    table = made.table[made.table["seed"].eq(0)]
    runs = table.assign(
        status="completed",
        timing_valid=True,
        timing_note=None,
        cell=0,
        **{"sweep_dir": "out/mine", "launch.command": "batchscape sweep sweeps=mine"},
    )
    return replace(made, table=table, runs=runs, same_sweeps=runs)


def test_one_run_commands_nothing_and_says_what_would_settle_it():
    cuts = [(1, 8, 4), (1, 32, 1)]
    one = of_one_seed(evidence(cuts, reaches=None))
    recommendation = recommend(one, Needs())
    assert recommendation.geometry == (1, 32, 1)
    assert recommendation.headline == (
        "1 x 32 x 1 = 32 (devices x micro-batch x accumulation = global batch) was the fastest in "
        "its 1 run, but 1 run cannot tell which to use (n = 1); too few seeds or valid times to "
        "compare it with 1 x 8 x 4 (n = 1). The same sweep with more seeds settles it: batchscape "
        "sweep sweeps=mine seed=0,1,2 sweep_dir=out/mine"
    )
    carried = recommendation.as_mapping()
    assert (carried["n_runs"], carried["time_high_s"], carried["is_recommended"]) == (
        1,
        None,
        False,
    )
    three = recommend(evidence(cuts, reaches=None), Needs())
    assert three.headline.startswith("Use 1 x 32 x 1 = 32 ")


def test_a_cut_timed_once_of_three_seeds_asks_for_times():
    made = evidence([(1, 8, 4), (1, 32, 1)], steps={32: STEPS[32]})
    made = untimed(made, lambda table: table["micro_batch_size"].eq(32) & table["seed"].gt(0))
    is_valid = made.table["step_time_s"].notna()
    runs = made.table.assign(
        status="completed",
        timing_valid=is_valid,
        cell=made.table["run_id"].str[:4],
        timing_note=np.where(is_valid, None, "2 runs at the same time"),
        **{"sweep_dir": "out/mine", "launch.command": "batchscape sweep sweeps=mine"},
    )
    headline = recommend(replace(made, runs=runs, same_sweeps=runs), Needs()).headline
    assert headline.startswith("1 x 32 x 1 = 32 (devices")
    assert "was the fastest in its 1 run, to reach a held-out loss of 2.5, but 1 run" in headline
    assert headline.endswith("timing_repeat=1 sweep_dir=out/mine")
    assert "Times of 2 of 6 completed runs do not count" in headline


def test_one_seed_does_not_choose_between_global_batches():
    steps = {batch: taken[:1] for batch, taken in STEPS.items()}
    headline = recommend(evidence(steps=steps), Needs()).headline
    assert "was the fastest in its 1 seed, to reach" in headline
    # Cuts of one global batch take its steps, whatever seed they are of.
    one_batch = recommend(evidence([(1, 8, 4), (1, 32, 1)], steps={32: [100.0]}), Needs())
    assert one_batch.headline.startswith("Use 1 x 32 x 1 = 32 ")


def test_a_report_of_one_run_a_cut_recommends_nothing(build):
    sweep = build()
    for cut in [(1, 8, 4), (1, 32, 1)]:
        sweep.run(cut)
    tables = load(sweep.path)
    section = decision_section(find_cells(tables.runs), tables)
    assert "in its 1 run" in section.first_screen[0]
    assert "cannot tell which to use (n = 1)" in section.first_screen[0]
    (table,) = section.tables
    assert not table.frame["recommended"].any()
    assert section.headlines == {}
