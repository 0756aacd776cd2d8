import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.config import RunConfig
from batchscape.cuda_devices import CudaDevice
from batchscape.errors import ConfigError
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.plan.resolve import check_multiples
from batchscape.record.spec import DataIdentity


def gpus(*capabilities):
    devices = tuple(
        CudaDevice(i, "a GPU", capability, f"GPU-{i}") for i, capability in enumerate(capabilities)
    )
    return Machine(4, "a CPU", devices)


def test_one_run(plan):
    (spec,) = plan().specs
    assert str(spec.geometry) == "1 x 8 x 4 = 32"
    assert (spec.samples, spec.optimizer_steps) == (3840, 120)
    assert (spec.device_type, spec.precision) == ("cpu", "float32")
    assert spec.evaluation_every_samples == 640


@pytest.mark.parametrize(
    ("lines", "samples"),
    [
        (["budget=samples", "budget.samples=320"], 320),
        (["budget=tokens", "budget.tokens=20480"], 320),
        (["budget=optimizer_steps", "budget.optimizer_steps=10"], 320),
        (["batch.global_batch_size=null", "batch.global_batch_tokens=2048"], 3840),
    ],
)
def test_budgets(lines, samples, plan):
    (spec,) = plan(*lines, "evaluation.every_samples=320").specs
    assert spec.samples == samples
    assert spec.optimizer_steps == samples // 32
    assert spec.geometry.global_batch_size == 32


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["budget.samples=100"], r"budget\.samples must be .*32; given 100; use 96 or 128"),
        (["budget.samples=10"], r"given 10; use 32"),
        (["evaluation.every_samples=33"], r"evaluation\.every_samples .* use 32 or 64"),
        (["budget=tokens", "budget.tokens=100"], r"budget\.tokens .*x sequence_length 64.*2048"),
        (["batch.global_batch_size=32,96,40"], r"480, the least common multiple of .* 32, 40, 96"),
        (
            ["schedule=cosine", "budget.samples=320"],
            r"warmup_samples must be below .*; use schedule\.warmup_samples=319 or less",
        ),
        (
            ["schedule=wsd", "schedule.decay_samples=3521"],
            r"320 \+ 3521 > 3840 samples; use schedule\.decay_samples=3520 ",
        ),
        (["model.vocabulary_size=255"], "at least the data's vocabulary, 256; given 255"),
        (["evaluation.samples=361"], "given 361, held out: 360; use evaluation.samples=360$"),
        (
            ["budget.samples=100", "evaluation.every_samples=33"],
            r"given 100; use 96 or 128\nevaluation\.every_samples .* given 33; use 32 or 64$",
        ),
        (["budget=optimizer_steps", "budget.optimizer_steps=999999999999999999"], r"2\*\*63"),
        (["launcher.device=cuda"], "no CUDA device"),
        (
            ["engine.precision=float16", "model.loss_chunk=64"],
            "take engine.precision=bfloat16, or model.loss_chunk=null",
        ),
        (["launcher.concurrent_runs=1,2"], "launcher is one for the whole sweep"),
        (["tracker=wandb,none"], "tracker is one for the whole sweep"),
        (["sweep_name=a,b"], "sweep_name is one for the whole sweep"),
        (["sweep_dir=a,b"], "sweep_dir is one for the whole sweep"),
    ],
)
def test_rules(lines, message, plan):
    with pytest.raises(ConfigError, match=message):
        plan(*lines)


def test_multiples_hold_for_launched_cells_only(plan):
    # 7 does not divide by a micro-batch of 8, so its global batch is no part of the sweep's.
    sweep_plan = plan("batch.global_batch_size=7,32,64")
    assert {spec.geometry.global_batch_size for spec in sweep_plan.specs} == {32, 64}
    assert len(sweep_plan.rejections) == 1


CONFIG = RunConfig.from_mapping(
    {
        "batch": {},
        "model": {"name": "gpt", "n_layers": 1, "n_heads": 1, "d_model": 8},
        "data": {"name": "stdlib"},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "schedule": {"name": "constant"},
        "scaling": {},
        "budget": {"samples": 720},
        "evaluation": {},
        "engine": {"name": "ddp"},
        "loader": {},
        "checkpoint": {},
        "measure": {},
        "launcher": {"name": "local"},
        "tracker": {"name": "none"},
    }
)


@given(st.sets(st.integers(1, 60), min_size=1, max_size=5))
def test_a_budget_fits_when_every_global_batch_divides_it(global_batches):
    """What is said is found again by trying every number of samples up to the reach."""
    fits = all(720 % size == 0 for size in global_batches)
    if fits:
        check_multiples(CONFIG, global_batches)
        return
    with pytest.raises(ConfigError) as caught:
        check_multiples(CONFIG, global_batches)
    message = str(caught.value)
    in_reach = [n for n in range(1, 7201) if not any(n % size for size in global_batches)]
    if not in_reach:
        assert "have no common multiple up to 7200 samples; use fewer of them, or" in message
        assert "budget=optimizer_steps" in message
        return
    suggested = [int(word) for word in message.rpartition("use ")[2].split(" or ")]
    common = in_reach[0]
    for value in suggested:
        assert value > 0
        assert all(value % size == 0 for size in global_batches)
        assert abs(value - 720) < common


def test_the_reach_grows_with_the_global_batch():
    """A budget below one optimizer step says nothing of how long a sweep may be."""
    with pytest.raises(ConfigError, match=r"global batches 3000, 4000; given 720; use 12000$"):
        check_multiples(CONFIG, {3000, 4000})


def test_more_ranks_than_cores_may_hold(plan):
    sweep_plan = plan("batch.data_parallel_size=1,4,8", "launcher.oversubscribe=2")
    assert [spec.geometry.data_parallel_size for spec in sweep_plan.specs] == [1, 4]
    batch = "batch.global_batch_size=64"
    (rejected,) = plan("batch.data_parallel_size=1,8", batch).rejections
    assert "2 x 2 = 4; data_parallel_size=8" in rejected.reason
    assert "launcher.oversubscribe=4 would let ranks share cores" in rejected.reason
    assert rejected.geometry is not None
    large = plan("batch.data_parallel_size=1,8", batch, machine=Machine(8, "eight cores"))
    assert rejected.run_id in {spec.run_id for spec in large.specs}


def test_one_rank_a_cuda_device(plan):
    sweep_plan = plan("batch.data_parallel_size=1,2,4", machine=gpus((9, 0), (9, 0)))
    assert [spec.geometry.data_parallel_size for spec in sweep_plan.specs] == [1, 2]
    assert {spec.device_type for spec in sweep_plan.specs} == {"cuda"}
    (rejected,) = sweep_plan.rejections
    assert "ranks that share one = 2 x 1 = 2; data_parallel_size=4" in rejected.reason
    lines = ["batch.data_parallel_size=1,2,4", "launcher.oversubscribe=2"]
    assert len(plan(*lines, machine=gpus((9, 0), (9, 0))).specs) == 3


@pytest.mark.parametrize(
    ("machine", "lines", "expected"),
    [
        (gpus((8, 0), (8, 6)), [], "bfloat16"),
        (gpus((9, 0), (7, 5)), [], "float32"),
        (gpus((9, 0)), ["launcher.device=cpu"], "float32"),
        (gpus((9, 0)), ["engine.precision=float64"], "float64"),
    ],
)
def test_precision(machine, lines, expected, plan):
    (spec,) = plan(*lines, machine=machine).specs
    assert spec.precision == expected


def test_runs_on_two_devices_share_a_trajectory_and_a_folder_but_no_launch(plan):
    plans = [plan(f"launcher.device={kind}", machine=gpus((7, 0))) for kind in ("cpu", "cuda")]
    assert [spec.device_type for each in plans for spec in each.specs] == ["cpu", "cuda"]
    assert len({spec.trajectory_id for each in plans for spec in each.specs}) == 1
    assert len({spec.run_id for each in plans for spec in each.specs}) == 2
    assert len({each.sweep_name for each in plans}) == 1
    with pytest.raises(ConfigError, match="launch once for each launcher"):
        plan("launcher.device=cpu,cuda", machine=gpus((7, 0)))


def test_the_same_run_is_planned_once(plan):
    sweep_plan = plan("batch.gradient_accumulation_steps=null,4", "seed=0,0,1")
    assert len(sweep_plan.specs) == 2
    assert sweep_plan.repeated == 4
    assert len({cell.run_id for cell in sweep_plan.cells}) == len(sweep_plan.cells)


def test_an_impossible_run_is_an_error_and_an_impossible_cell_is_not(plan):
    with pytest.raises(ConfigError, match="multiple of data_parallel_size") as caught:
        plan("batch.micro_batch_size=5")
    assert "nearest that would work" in str(caught.value)
    sweep_plan = plan("batch.micro_batch_size=5,8")
    assert [rejection.reason for rejection in sweep_plan.rejections] == [str(caught.value)]
    with pytest.raises(ConfigError, match=r"launcher\.oversubscribe=4"):
        plan("batch.data_parallel_size=8", "batch.global_batch_size=64")


def test_nothing_to_launch_is_an_error(plan):
    with pytest.raises(ConfigError, match=r"(?s)none of the 4 cells.*/ 5 .*/ 7 ") as caught:
        plan("batch.micro_batch_size=5,7", "seed=0,1")
    assert str(caught.value).count("leaves") == 2


def test_one_mistake_is_told_once(plan):
    with pytest.raises(ConfigError) as caught:
        plan("+optimizer.lr=1", "seed=range(0,8)")
    assert str(caught.value).count("optimizer.lr") == 1
    with pytest.raises(ConfigError, match=r"(?s)learning_rate: .*in 8 of 16 cells") as caught:
        plan("optimizer.learning_rate=-1,1", "seed=range(0,8)")
    assert str(caught.value).count("-1.0") + str(caught.value).count("got -1") == 1
    with pytest.raises(ConfigError, match="and 7 further problems"):
        plan("optimizer.learning_rate=range(-12,0)")


def test_data_is_prepared_once_and_only_where_needed(grid, two_cores):
    prepared = []

    def prepare(config):
        prepared.append(config)
        return DataIdentity(str(config), "nowhere", 10_000, 1000, 256, task="next_token")

    lines = ["data.sequence_length=32,64", "seed=range(0,20)", "data.layout=packed,padded"]
    sweep_plan = make_plan(grid(*lines), two_cores, prepare)
    assert len(sweep_plan.specs) == 80
    assert len(prepared) == len(set(prepared)) == 4


def test_swept_values_stay_with_their_cell(plan):
    sweep_plan = plan("optimizer.learning_rate=0.1,0.2", "model=gpt_nano,gpt_micro")
    for cell in sweep_plan.cells:
        settings = cell.config.to_mapping()
        assert (
            settings["optimizer"]["learning_rate"] == cell.value_of_axis["optimizer.learning_rate"]
        )
        width = {"gpt_nano": 128, "gpt_micro": 32}[cell.value_of_axis["model"]]
        assert settings["model"]["d_model"] == width
