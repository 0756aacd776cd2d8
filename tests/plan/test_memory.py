"""What a training step allocates, predicted and measured."""

import gc
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from batchscape.config import Fsdp
from batchscape.measure.memory_report import MemoryReport
from batchscape.models.build import build_model
from batchscape.plan import memory_trace
from batchscape.plan.memory import memory_key, predict_memories
from batchscape.plan.parameters import count_parameters
from batchscape.record.tables import read_table
from batchscape.system import GIB

FIGURES = (
    "allocated_after_model_gib",
    "peak_allocated_first_backward_gib",
    "peak_allocated_first_optimizer_step_gib",
    "peak_allocated_steady_gib",
    "peak_allocated_gib",
)
SCALARS = 160
"""Bytes of scalars that kernels make within themselves, where no operator shows them."""
RANDOM_STATE = 5056
"""Bytes of a generator's state, which activation checkpointing keeps for each block."""

FLOAT32 = {"name": "ddp", "precision": "float32"}
BFLOAT16 = {"name": "ddp", "precision": "bfloat16"}
FLOAT16 = {"name": "ddp", "precision": "float16"}
FSDP = {"name": "fsdp", "precision": "bfloat16"}
ACCELERATE = {"name": "accelerate", "precision": "float32"}
FABRIC = {"name": "fabric", "precision": "float32"}
ADAMW = {"name": "adamw", "learning_rate": 0.1}
SGD = {"name": "sgd", "learning_rate": 0.1}
MUON = {"name": "muon", "learning_rate": 0.1}
GPT = {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32}
LLAMA = {"name": "llama", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 48}
TRANSFORMERS = {
    "name": "transformers",
    "settings": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32},
}
UNDROPPED = {
    "name": "transformers",
    "settings": {
        **TRANSFORMERS["settings"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}
"""With a kernel of attention that takes a mask or none, as without dropout."""
CONVOLUTIONS = {
    "model": {"name": "custom", "_target_": "own_models.Convolutions"},
    "data": {"name": "custom", "_target_": "own_data.Pictures"},
}
DIGITS = {"model": {"name": "mlp", "hidden_sizes": [64]}, "data": {"name": "digits"}}


def of_libraries(test):
    """Mark a test of engines of libraries, of which DeepSpeed's import warns."""
    warning = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    return pytest.mark.systems(pytest.mark.timeout(400)(pytest.mark.filterwarnings(warning)(test)))


def zero(stage, precision="float32"):
    return {"name": "deepspeed", "zero_stage": stage, "precision": precision}


@pytest.fixture(autouse=True)
def _own_code(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "faults")


@pytest.fixture
def run_of(spec_of):
    """Return a short run whose memory is measured."""

    def run(geometry, **settings):
        short = {
            "engine": FLOAT32,
            "measure": {"memory": True, "noise_scale_every": None},
            "budget": {"optimizer_steps": 1},
            "evaluation": {"samples": 2, "batch_size": 2},
        }
        return spec_of(geometry, **{**short, **settings})

    return run


def predict_memory(spec):
    (report,) = predict_memories([spec])
    return report


def bytes_of(report):
    return {name: round(getattr(report, name) * GIB) for name in FIGURES}


def measured(trainer, spec, folder):
    """Bytes on the rank that held most, by the CPU's allocator."""
    ranks = read_table(trainer.train(spec, folder), "ranks")
    assert set(ranks["memory_method"]) == {"cpu allocator events"}
    return {name: round(ranks[name].max() * GIB) for name in FIGURES}


def broadcast_bytes(spec):
    """Bytes of the buffers that DDP joins and sends at a forward.

    It lets go of them before the backward, but for a thread of gloo, which does so when it likes.
    """
    if isinstance(spec.config.engine, Fsdp) or spec.geometry.data_parallel_size == 1:
        return 0
    module = build_model(spec.config, spec.data, spec.precision)
    return sum(buffer.nbytes for buffer in module.buffers())


def predicted_and_most_bytes(spec):
    """Bytes, and those with all that a thread of gloo may hold a moment longer than it should.

    Of one rehearsal, which takes a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        traces, trace = [], memory_trace.trace
        patch.setattr(memory_trace, "trace", lambda *run: traces.append(trace(*run)) or traces[-1])
        predicted = bytes_of(predict_memory(spec))
    (rehearsed,) = traces
    most = MemoryReport.from_bytes("", rehearsed.allocated("cpu", lingering=True))
    return predicted, bytes_of(most)


def product_bytes():
    """Most that a product of these sizes takes within itself, in bfloat16, which is Muon's.

    That is up to the processor: with AVX-512 BF16, oneDNN copies what it multiplies.
    """
    wide, tall = (torch.ones(size, dtype=torch.bfloat16) for size in ((32, 128), (128, 32)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as meter:
        product = wide @ tall
    taken = [event.nbytes() for event in meter.profiler.kineto_results.events()]
    return max(0, sum(size for size in taken if size > 0) - product.nbytes)


def padded_bytes_of_gpt(ranks, width=32):
    """What the first rank has of `GPT`, each parameter cut by rows and rounded up."""
    vectors = [width] * 6 + [3 * width, 4 * width]
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = sum(-(-rows // ranks) * columns for rows, columns in matrices)
    block += sum(-(-rows // ranks) for rows in vectors)
    tables = sum(-(-rows // ranks) * width for rows in (256, 32))
    return 4 * (2 * block + tables + 2 * -(-width // ranks))


def test_a_prediction_is_what_a_rank_allocates(run_of, trainer, tmp_path):
    spec = run_of((2, 8, 2), engine=BFLOAT16)
    predicted, sizes = bytes_of(predict_memory(spec)), measured(trainer, spec, tmp_path)
    assert predicted == pytest.approx(sizes, abs=SCALARS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometry", "settings"),
    [
        ((1, 32, 1), {}),
        ((2, 4, 1), {"model": LLAMA, "optimizer": MUON}),
        ((1, 8, 3), {"model": LLAMA, "engine": BFLOAT16, "optimizer": SGD}),
        ((1, 8, 2), {"engine": FLOAT16}),
        ((1, 8, 2), {"model": {**GPT, "loss_chunk": 48}}),
        ((1, 8, 2), {"model": {**GPT, "dropout": 0.1}, "engine": BFLOAT16}),
        ((2, 8, 2), {"model": TRANSFORMERS, "engine": BFLOAT16}),
        ((1, 5, 2), {"model": UNDROPPED}),
        ((1, 32, 2), DIGITS),
        ((1, 8, 2), {"engine": FSDP}),
        ((2, 8, 1), {"engine": FSDP}),
        ((2, 8, 2), {"engine": {**FSDP, "precision": "float32"}, "model": LLAMA}),
        ((2, 8, 2), {"engine": {**FSDP, "reshard_after_forward": False}}),
        ((1, 8, 2), {"evaluation": {"samples": 2, "ema_half_life_tokens": 999.0}}),
    ],
)
def test_predictions_are_what_ranks_allocate(geometry, settings, run_of, trainer, tmp_path):
    spec = run_of(geometry, **settings)
    predicted, most = predicted_and_most_bytes(spec)
    sizes = measured(trainer, spec, tmp_path)
    held = broadcast_bytes(spec)
    may_be_held = {
        name: held if sizes[name] > predicted[name] + SCALARS else 0
        for name in ("peak_allocated_steady_gib", "peak_allocated_gib")
    }
    sizes = {name: size - may_be_held.get(name, 0) for name, size in sizes.items()}
    within = product_bytes() if settings.get("optimizer") == MUON else 0
    for name, size in sizes.items():
        assert predicted[name] - SCALARS <= size <= most[name] + SCALARS + within, name


OF_LIBRARIES = (
    ("accelerate", {**ACCELERATE, "precision": "bfloat16"}, SGD, GPT),
    ("lightning_fabric", FABRIC, ADAMW, LLAMA),
    ("deepspeed", zero(0), ADAMW, GPT),
    ("deepspeed", zero(1, "bfloat16"), SGD, LLAMA),
    ("deepspeed", zero(2, "bfloat16"), ADAMW, LLAMA),
    ("deepspeed", zero(3), ADAMW, LLAMA),
    ("deepspeed", zero(3, "bfloat16"), SGD, GPT),
)
ALONE, WITHOUT_ACCUMULATION, WITH_BOTH = (1, 8, 2), (2, 8, 1), (2, 8, 2)


@of_libraries
@pytest.mark.parametrize(
    ("library", "engine", "optimizer", "model", "geometry"),
    [
        *((*case, WITH_BOTH) for case in OF_LIBRARIES),
        *((*case, ALONE) for case in OF_LIBRARIES[0::3]),
        *((*case, WITHOUT_ACCUMULATION) for case in OF_LIBRARIES[1::3]),
    ],
)
def test_predictions_are_what_libraries_allocate(
    library, engine, optimizer, model, geometry, run_of, trainer, tmp_path
):
    pytest.importorskip(library)
    spec = run_of(geometry, engine=engine, optimizer=optimizer, model=model)
    predicted, most = predicted_and_most_bytes(spec)
    buffers = broadcast_bytes(spec)
    # On a busy machine a thread of gloo holds an exchange for longer than anybody can say: of each
    # phase the least of some trainings counts, as long as there was such a one. DeepSpeed exchanges
    # all gradients with itself, where a rank is alone: once they were held whole, 138,752 bytes.
    sizes = measured(trainer, spec, tmp_path / "0")
    exchanges = library == "deepspeed" or spec.geometry.data_parallel_size > 1
    for again in range(1, 3 if exchanges else 1):
        if all(size <= most[name] + SCALARS + buffers for name, size in sizes.items()):
            break
        other = measured(trainer, spec, tmp_path / str(again))
        sizes = {name: min(size, other[name]) for name, size in sizes.items()}
    for name, size in sizes.items():
        assert predicted[name] - SCALARS <= size, name
        # The first update comes when much was exchanged, and is no peak.
        if name != "peak_allocated_first_optimizer_step_gib":
            assert size <= most[name] + SCALARS + buffers, name
    peak = "peak_allocated_gib"
    assert sizes[peak] == pytest.approx(predicted[peak], rel=0.03)


@of_libraries
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_cuts_what_its_stage_says(stage, run_of):
    """By counting: 4 bytes each of P parameters and N ranks, after the model was wrapped."""
    pytest.importorskip("deepspeed")
    run, many = (run_of((ranks, 2, 1), engine=zero(stage)) for ranks in (2, 64))
    parameters = 4 * count_parameters(run.config, run.data)
    # Stages 1 and 2 keep a part of the weights twice, for the update. Stage 3 has only that,
    # a part of the gradients, and a buffer for the exchange as large as so small a model.
    held = {0: (1, 0), 1: (1, 1), 2: (1, 1), 3: (1, 3)}[stage]
    for ranks, report in zip((2, 64), predict_memories([run, many]), strict=True):
        counted = held[0] * parameters + held[1] * parameters / ranks
        # Parts are padded to whole numbers for each of the 26 parameters, and aligned.
        slack = SCALARS + 3 * 26 * 4 * ranks + 16 * ranks
        held_bytes = bytes_of(report)["allocated_after_model_gib"]
        assert held_bytes == pytest.approx(counted, abs=slack)


@of_libraries
def test_deepspeed_leaves_no_word_for_trainings_that_follow(run_of, monkeypatch):
    """Such as the kind of device that it chose for the prediction."""
    pytest.importorskip("deepspeed")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    before, moved = dict(os.environ), torch.nn.Module.to
    assert predict_memory(run_of((2, 4, 2), engine=zero(2))).problem is None
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "LOCAL_SIZE"):
        assert os.environ.get(name) == before.get(name)
    assert torch.nn.Module.to is moved
    assert not dist.is_initialized()


def test_what_may_linger_counts_where_it_is_asked_for():
    """A storage of 3 bytes, one of 5 that may outlive it as a copy, one of 7 while it does."""
    trace = memory_trace.Trace(
        sizes=np.array([3, 5, 5, 7]),
        events=np.array([1, 2, -2, 3, 4, -3, -4, -1]),
        phases=(("after_model", 0), ("first_backward", 1)),
        attends_by_parts=False,
        lingering=(3,),
    )
    few, most = (
        trace.allocated("cpu", lingering=counts_lingering) for counts_lingering in (False, True)
    )
    assert few["after_model"].last == most["after_model"].last == 3
    assert few["first_backward"].peak == 3 + 7
    assert most["first_backward"].peak == 3 + 5 + 7


def test_a_peak_that_threads_of_gloo_make_is_not_predicted(run_of):
    """On CUDA there are none of these threads."""
    run = run_of((2, 8, 1), engine={**FSDP, "precision": "float32"}, **DIGITS)
    here, there = predict_memories([run, replace(run, device_type="cuda")])
    assert "threads of gloo may hold exchanged tensors" in here.problem
    assert there.problem is None


@pytest.mark.slow
def test_recomputed_activations_are_predicted_but_for_random_states(run_of, trainer, tmp_path):
    engine = {**BFLOAT16, "activation_checkpointing": True}
    spec = run_of((1, 8, 2), engine=engine)
    predicted, sizes = bytes_of(predict_memory(spec)), measured(trainer, spec, tmp_path)
    states = 2 * RANDOM_STATE
    for name in FIGURES:
        assert 0 <= sizes[name] - predicted[name] <= states + SCALARS
    without = predict_memory(run_of((1, 8, 2), engine=BFLOAT16))
    assert predicted["peak_allocated_gib"] < 0.8 * bytes_of(without)["peak_allocated_gib"]


@pytest.mark.slow
def test_what_is_held_is_parameters_gradients_state_and_buckets(run_of):
    """By counting: 4 bytes each of P parameters, as many of gradients, twice as many of moments."""
    alone, among = run_of((1, 2, 1)), run_of((4, 2, 1))
    parameters = 4 * count_parameters(alone.config, alone.data)
    one, many = map(bytes_of, predict_memories([alone, among]))
    assert one["allocated_after_model_gib"] == pytest.approx(parameters, abs=SCALARS)
    assert many["allocated_after_model_gib"] == pytest.approx(2 * parameters, abs=SCALARS)
    # Each of AdamW's step counters is a number more.
    for sizes in (one, many):
        updating = sizes["peak_allocated_first_optimizer_step_gib"]
        assert updating == pytest.approx(4 * parameters, abs=SCALARS + 4 * 2 * 26)


@pytest.mark.slow
def test_accumulation_costs_one_gradient_and_no_more(run_of):
    """On one rank; with DDP the buckets hold a gradient from the beginning, and it is another."""
    for ranks in (1, 2):
        runs = [run_of((ranks, 4, steps)) for steps in (1, 2, 3, 64)]
        one, two, three, many = predict_memories(runs)
        gradient = 4 * count_parameters(runs[0].config, runs[0].data)
        grown = bytes_of(two)["peak_allocated_gib"] - bytes_of(one)["peak_allocated_gib"]
        assert grown == pytest.approx(gradient, abs=SCALARS)
        assert two == three == many
        assert len({memory_key(run) for run in runs}) == 2


@pytest.mark.slow
def test_further_ranks_of_ddp_change_nothing_and_those_of_fsdp_cut_further(run_of):
    two, thousand = run_of((2, 4, 2)), run_of((1024, 4, 2))
    assert memory_key(two) == memory_key(thousand) != memory_key(run_of((1, 4, 2)))
    # Apart, so that both are rehearsed.
    assert predict_memory(two) == predict_memory(thousand)
    # Large enough that threads of gloo do not make the peak.
    few, many = (predict_memory(run_of((ranks, 32, 1), engine=FSDP)) for ranks in (2, 1024))
    # A device mesh holds the list of the ranks as int32.
    parts = [padded_bytes_of_gpt(ranks) + 4 * ranks for ranks in (2, 1024)]
    for report, part in zip((few, many), parts, strict=True):
        assert bytes_of(report)["allocated_after_model_gib"] == pytest.approx(part, abs=SCALARS)
    assert memory_key(run_of((2, 4, 1), engine=FSDP)) != memory_key(two)


@settings(max_examples=2)
@given(sizes=st.sets(st.integers(1, 48), min_size=6, max_size=7))
@pytest.mark.slow
def test_micro_batches_between_are_what_they_are_alone(sizes, spec_of):
    """And a larger one never holds less."""
    model = {**GPT, "n_layers": 1, "loss_chunk": 400}
    runs = [spec_of((1, size, 2), engine=BFLOAT16, model=model) for size in sorted(sizes)]
    traces = {}

    def trace(spec, *others):
        """Rehearse each once: three together, and those between alone."""
        key = spec.geometry, str(others)
        if key not in traces:
            traces[key] = rehearse(spec, *others)
        return traces[key]

    rehearse = memory_trace.trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_trace, "trace", trace)
        together = predict_memories(runs)
        assert together == [predict_memory(run) for run in runs]
    peaks = [report.peak_allocated_gib for report in together]
    assert peaks == sorted(peaks)


@pytest.mark.slow
def test_each_key_is_rehearsed_once_and_of_many_micro_batches_four(run_of, monkeypatch):
    rehearsed = []
    trace = memory_trace.trace

    def counted(spec, *others):
        rehearsed.append(spec.geometry.micro_batch_size)
        return trace(spec, *others)

    monkeypatch.setattr(memory_trace, "trace", counted)
    sizes = range(1, 14)
    runs = [
        run_of((1, size, steps), seed=seed, model={**GPT, "n_layers": 1})
        for size in sizes
        for steps, seed in ((2, 0), (3, 1))
    ]
    reports = predict_memories(runs)
    assert sorted(rehearsed) == [1, 2, 8, 13]
    assert reports[::2] == reports[1::2]
    assert len({report.peak_allocated_gib for report in reports}) == len(sizes)


def test_the_key_holds_what_decides_memory_and_nothing_else(run_of):
    base = run_of((1, 8, 2))
    same = [
        {"seed": 3},
        {"optimizer": {"name": "adamw", "learning_rate": 1.0, "beta1": 0.5}},
        {"budget": {"optimizer_steps": 7}},
        {"loader": {"workers": 1}},
        {"device": {"memory_limit_gib": 1.0}},
    ]
    other = [
        {"optimizer": SGD},
        {"engine": BFLOAT16},
        {"engine": {**FLOAT32, "activation_checkpointing": True}},
        {"model": {**GPT, "n_layers": 3}},
        {"data": {"name": "stdlib", "sequence_length": 33}},
        {"evaluation": {"samples": 2, "ema_half_life_tokens": 9.0}},
    ]
    assert {memory_key(run_of((1, 8, 2), **some)) for some in same} == {memory_key(base)}
    keys = {memory_key(run_of((1, 8, 2), **some)) for some in other}
    assert len(keys | {memory_key(base), memory_key(run_of((1, 9, 2)))}) == len(other) + 2


def test_cuda_counts_blocks_of_512_bytes(run_of):
    run = run_of((1, 3, 2), engine=BFLOAT16)
    here, there = predict_memories([run, replace(run, device_type="cuda")])
    for name in FIGURES:
        exact, in_blocks = (round(getattr(report, name) * GIB) for report in (here, there))
        assert in_blocks % 512 == 0
        # A tensor of this model is rounded by less than a block, and less than 1,000 live.
        assert exact <= in_blocks < exact + 512 * 1000
    assert there.method != here.method


def test_inputs_that_numpy_allocates_count_on_cuda_alone(run_of):
    run = run_of((1, 512, 1), **DIGITS)
    here, there = map(bytes_of, predict_memories([run, replace(run, device_type="cuda")]))
    name = "peak_allocated_first_backward_gib"
    inputs_and_labels = 512 * (64 * 4 + 8)
    assert inputs_and_labels <= there[name] - here[name] < inputs_and_labels + 512 * 50


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"engine": {**FLOAT32, "compile": True}},
            "memory is predicted only with engine.compile=false",
        ),
        (
            {"model": {"name": "custom", "_target_": "own_models.Looking"}},
            "cannot be rehearsed on tensors without numbers: DataDependentOutputException",
        ),
        (
            {
                "model": {"name": "custom", "_target_": "own_models.Bigram"},
                "data": {"name": "custom", "_target_": "own_data.Ragged"},
            },
            "samples differ in their shape",
        ),
    ],
)
def test_what_is_not_predicted_is_refused_with_a_reason(settings, says, run_of):
    refused, there = predict_memories([run_of((1, 4, 1), **settings), run_of((1, 4, 1))])
    assert says in refused.problem
    assert {getattr(refused, name) for name in FIGURES} == {None}
    assert there.problem is None


def test_dropout_of_attention_is_not_predicted_for_cuda(run_of):
    run = run_of((1, 4, 1), model={**GPT, "dropout": 0.1})
    here, there = predict_memories([run, replace(run, device_type="cuda")])
    assert here.problem is None
    assert "memory is predicted only for dropout 0" in there.problem
    assert there.peak_allocated_gib is None


def test_convolutions_are_predicted_for_cuda_alone(run_of):
    """Kernels of a processor take as much as they like; those of CUDA are not seen either way."""
    run = run_of((1, 4, 1), **CONVOLUTIONS)
    here, there = predict_memories([run, replace(run, device_type="cuda")])
    assert "memory of convolutions is predicted only for CUDA devices" in here.problem
    assert there.problem is None


def test_the_group_of_the_caller_is_left_alone(run_of, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        report = predict_memory(run_of((2, 4, 1), engine=FSDP))
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    assert "a process that has no process group" in report.problem


@pytest.mark.parametrize("settings", [{"model": TRANSFORMERS}, {"engine": FSDP}])
def test_nothing_is_left_behind(settings, run_of, tmp_path, monkeypatch):
    run = run_of((2, 4, 2), **settings)
    monkeypatch.chdir(tmp_path)
    module, resize = dict(vars(torch.nn.Module)), torch.UntypedStorage.resize_

    def state():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_default_device(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            gc.isenabled(),
            dist.is_initialized(),
        )

    before = state()
    assert predict_memory(run).problem is None
    assert state() == before
    assert list(tmp_path.iterdir()) == []
    # `transformers` adds one of its own where it builds a model.
    assert {name: vars(torch.nn.Module)[name] for name in module} == module
    assert torch.UntypedStorage.resize_ is resize
    assert type(torch.empty(1)) is torch.Tensor


@pytest.mark.slow
def test_under_fsdp_no_device_is_given_the_whole_model(run_of):
    """A block beside the parts; on a CPU the first rank holds what it draws."""
    spec = run_of((64, 1, 1), engine=FSDP, model=GPT | {"n_layers": 8, "d_model": 128})
    model_bytes = 4 * count_parameters(spec.config, spec.data)
    sample = memory_trace.sample_of(spec)
    on_cuda, on_cpu = (
        memory_trace.trace(replace(spec, device_type=kind), sample, spec.geometry)
        .allocated(kind)["after_model"]
        .peak
        for kind in ("cuda", "cpu")
    )
    assert on_cuda < model_bytes / 2 < model_bytes <= on_cpu


def test_under_fsdp_an_update_takes_parts_of_the_model_alone(run_of):
    """By counting: parameters, gradients and two moments, of each the part of one of 64 ranks.

    The width is that of no other test: of a shape that it has met, torch remembers the answers.
    """
    ranks, width = 64, 40
    optimizer = ADAMW | {"gradient_clip_norm": 1.0}
    spec = run_of((ranks, 1, 1), engine=FSDP, model=GPT | {"d_model": width}, optimizer=optimizer)
    trace = memory_trace.trace(spec, memory_trace.sample_of(spec), spec.geometry)
    held = 4 * padded_bytes_of_gpt(ranks, width) + 4 * ranks
    # Each of 28 parameters has a step counter, and norms of its gradient.
    slack = SCALARS + 28 * 4 * 4
    assert trace.allocated("cpu")["first_optimizer_step"].peak == pytest.approx(held, abs=slack)
