"""Ranges of step times against trainings that others have published.

`published_step_times.csv` holds all rows in bfloat16 of MosaicML's benchmarks of MPT models with
FSDP, https://github.com/mosaicml/llm-foundry/blob/8c8dd48f/scripts/train/benchmarking/README.md,
and those of one dimension without float8 of torchtitan's benchmarks of Llama 3.1 8B,
https://github.com/pytorch/torchtitan/blob/b5bcd76c/benchmarks/llama3_h100_202412_torchtitan.md.
The middles of `plan.step_time` are fitted to MosaicML's rows without 760M, 3B and 70B: those, a
third, and torchtitan's are kept out.

Both gather weights in bfloat16, where our engine gathers float32, and MosaicML's "PURE" reduces
gradients in bfloat16: their rows are predicted with the bytes that they exchanged. torchtitan's
hosts have devices of 96 GB with 2.4 TB/s, and recompute part of the activations, which counts as
nothing here.
"""

import copy
import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.config.cluster import datasheets
from batchscape.data.corpus import prepare
from batchscape.geometry import BatchGeometry
from batchscape.plan import step_time
from batchscape.plan.machine import Machine
from batchscape.plan.step_time import OperationCounts, StepTimeRanges
from batchscape.record.spec import RunSpec, Stage

KEPT_OUT = ("760m", "3b", "70b")
MODELS = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Width, heads and layers: https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/yamls."""
GPT = ("model=gpt2_124m", "model.vocabulary_size=50368")
LLAMA_8B = (
    *("model=llama_1b", "model.d_model=4096", "model.n_heads=32", "model.n_kv_heads=8"),
    *("model.d_ff=14336", "model.vocabulary_size=128256"),
)
SHEETS = {sheet.device: sheet for sheet in datasheets()}


@functools.cache
def rows():
    return pd.read_csv(Path(__file__).parent / "published_step_times.csv")


def words(row):
    """Return the settings of a row, but for its layers."""
    if row.model == "llama_8b":
        model = LLAMA_8B
    else:
        width, heads, _ = MODELS[row.model]
        model = (*GPT, f"model.d_model={width}", f"model.n_heads={heads}")
    return (
        *model,
        f"data.sequence_length={row.sequence_length}",
        "engine=fsdp",
        f"engine.activation_checkpointing={bool(row.checkpointing)}",
        f"engine.reshard_after_forward={bool(row.gathers_again)}",
        f"engine.compile={bool(row.compile)}",
    )


@functools.cache
def composed(options):
    """Return the settings of options of groups, which Hydra takes long to compose."""
    grid = compose([*options, "cluster=h100_80g"], "batchscape plan")
    return grid.cells[0].settings


@functools.cache
def config_of(arguments):
    """Return a configuration of options, and of settings, which are set in it."""
    options = tuple(each for each in arguments if "." not in each.partition("=")[0])
    settings = copy.deepcopy(composed(options))
    for setting in (each for each in arguments if each not in options):
        key, _, value = setting.partition("=")
        group, name = key.split(".")
        assert name in settings[group]
        settings[group][name] = yaml.safe_load(value)
    return RunConfig.from_mapping(settings)


@functools.cache
def identity_of(data):
    """Return what `prepare` says of data, which is asked for in each row."""
    return prepare(data)


def spec_of(config, geometry):
    return RunSpec(
        run_id="b",
        trajectory_id="t",
        sweep_name="s",
        stages=(Stage(geometry.global_batch_size, geometry, config.optimizer),),
        device_type="cuda",
        precision="bfloat16",
        evaluation_every_samples=None,
        data=identity_of(config.data),
        config=config,
    )


count_operations = step_time._count_operations
PROBED = {"d_model": (64, 128, 192), "sequence_length": (64, 128, 256), "n_layers": (1, 2)}
"""What a transformer does is a polynomial of these, of degree 2, 2 and 1: small ones tell all."""


@functools.cache
def small(arguments, width, length, layers):
    config = config_of(
        (*arguments, f"model.d_model={width}", f"data.sequence_length={length}", "model.n_heads=2")
    )
    config = replace(config, model=replace(config.model, n_layers=layers))
    counts = count_operations(config, prepare(config.data), "bfloat16")
    assert isinstance(counts, OperationCounts), counts
    return flat(counts)


def through(nodes, at):
    """Return Lagrange's weights of the nodes."""
    return [
        math.prod((at - other) / (node - other) for other in nodes if other != node)
        for node in nodes
    ]


def facts(config, data, precision):  # noqa: ARG001
    """Return what a large GPT does, from small ones; of a Llama from fewer layers."""
    model = config.model
    if model.name == "llama":
        one, two = (
            count_operations(replace(config, model=replace(model, n_layers=n)), data, "bfloat16")
            for n in (1, 2)
        )
        assert isinstance(one, OperationCounts)
        assert isinstance(two, OperationCounts)
        values = np.array(flat(one)) + (model.n_layers - 1) * (
            np.array(flat(two)) - np.array(flat(one))
        )
    else:
        sizes = model.d_model, config.sequence_length or 0, model.n_layers
        weights = [through(n, at) for n, at in zip(PROBED.values(), sizes, strict=True)]
        values = sum(
            math.prod(weight) * np.array(small(GPT, *place))
            for weight, place in zip(
                itertools.product(*weights), itertools.product(*PROBED.values()), strict=True
            )
        )
    flops, each, fixed, traffic, kernels, gradient, tensors = values.tolist()
    return OperationCounts(
        (flops, each), (fixed, traffic), kernels, round(gradient), round(tensors), 0.0
    )


def flat(counts):
    return [
        *counts.flops,
        *counts.traffic_bytes,
        counts.kernels,
        counts.gradient_bytes,
        counts.tensors,
    ]


def predicted(row):
    """Return the step time that was published, and the ends and the middle that are predicted."""
    config = config_of(words(row))
    layers = 32 if row.model == "llama_8b" else MODELS[row.model][2]
    config = replace(config, model=replace(config.model, n_layers=layers))
    nodes = max(1, row.devices // 8)
    sheet = replace(SHEETS[row.device], nodes=nodes)
    if row.source == "torchtitan":
        sheet = replace(sheet, memory_gb_per_s=2400.0)
    cut = row.micro_batch_size, row.accumulation
    geometry = BatchGeometry(nodes, row.devices // nodes, *cut)
    coefficients = StepTimeRanges(Machine.of(sheet)).coefficients(
        spec_of(config, geometry), geometry
    )
    reduced, gathered = coefficients.rings
    exchanged = (reduced / 2 if row.reduces_half else reduced, gathered / 2)
    low, middle, high = replace(coefficients, rings=exchanged).step_time_s(row.devices, *cut)
    tokens = geometry.global_batch_size * row.sequence_length
    return tokens / row.tokens_per_s, low, middle, high


def table(chosen):
    """Return `published`, `low`, `middle` and `high` of each row."""
    ranges = [predicted(row) for row in chosen.itertuples()]
    return pd.DataFrame(
        ranges, columns=["published", "low", "middle", "high"], index=chosen.index
    ).assign(devices=chosen["devices"], source=chosen["source"])


@pytest.fixture(autouse=True)
def shallow(monkeypatch):
    monkeypatch.setattr(step_time, "_count_operations", facts)


@pytest.mark.slow
def test_coverage():
    """The table of `plan.step_time`; the middle is neither fast nor slow."""
    summary = table(rows())
    published, kept_out = rows()["source"], rows()["model"].isin(KEPT_OUT)
    over_nodes = (summary["devices"] > 8) & published.eq("mosaicml")
    sets = {
        "fitted": published.eq("mosaicml") & ~kept_out,
        "kept out": kept_out,
        "over nodes": over_nodes,
        "over nodes, kept out": over_nodes & kept_out,
        "torchtitan": published.eq("torchtitan"),
    }
    expected = {
        "fitted": (140, 140),
        "kept out": (69, 69),
        "over nodes": (67, 67),
        "over nodes, kept out": (25, 25),
        "torchtitan": (4, 4),
    }
    is_inside = summary["published"].between(summary["low"], summary["high"])
    assert {name: (int(s.sum()), int(is_inside[s].sum())) for name, s in sets.items()} == expected
    off = summary["published"] / summary["middle"]
    for name in ("fitted", "kept out", "over nodes"):
        assert 0.95 < off[sets[name]].median() < 1.05, name
        assert (summary["high"] / summary["low"])[sets[name]].median() < 3.3, name


@pytest.mark.parametrize("arguments", [(512, 12, "125m")], ids=str)
def test_large_models_do_what_small_ones_tell(arguments):
    length, layers, name = arguments
    row = rows()[rows()["model"].eq(name) & rows()["sequence_length"].eq(length)].iloc[0]
    config = config_of(words(row))
    assert config.model.n_layers == layers
    data = prepare(config.data)
    of_all = count_operations(config, data, "bfloat16")
    assert isinstance(of_all, OperationCounts)
    assert flat(facts(config, data, "bfloat16")) == pytest.approx(flat(of_all), rel=1e-6)
