"""The grid against Hydra's own sweeper: the same lines give the same jobs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.errors import BatchscapeError, ConfigError
from batchscape.plan.build import make_plan
from batchscape.plan.expand import SweepCells
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity

MakeGrid = Callable[..., SweepCells]


def canonical(settings_of_cells: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(one, sort_keys=True) for one in settings_of_cells)


@pytest.fixture
def hydra_jobs() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Expand by Hydra's basic sweeper and compose every job from scratch."""

    def jobs(*lines: str) -> list[dict[str, Any]]:
        with initialize_config_module("batchscape.conf", version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            parser = OverridesParser.create(config_loader=hydra.config_loader)
            (batch,) = BasicSweeper.split_arguments(parser.parse_overrides(list(lines)), None)
            composed = [hydra_compose("config", list(job)) for job in batch]
            return [OmegaConf.to_container(job, resolve=True) for job in composed]  # type: ignore[misc]  # a mapping, as its source is one

    yield jobs
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    "lines",
    [
        ["seed=3"],
        ["seed=0,1", "batch.micro_batch_size=4,8"],
        ["batch.global_batch_size=choice(32,64)", "batch.global_batch_size=96,128"],
        *(
            pytest.param(lines, marks=pytest.mark.slow)
            for lines in (
                [],
                ["seed=range(0,3)", "optimizer.learning_rate=range(0.1,0.3,0.1)"],
                ["optimizer=sgd", "optimizer.momentum=0.5,0.9", "schedule=cosine,constant"],
                [
                    "batch={micro_batch_size: 2},{micro_batch_size: 4}",
                    "batch.micro_batch_size=8,16",
                ],
                ["model=gpt_nano,gpt_micro", "seed=1,2", "model.dropout=0.0,0.1"],
                ["model=glob(gpt_m*)"],
                ["tracker.tags=[a,b],[c]", "tracker.project='x y','z'"],
                ["batch.micro_batch_size=null,4"],
                ["batch.micro_batch_size=8,16", "++seed=1,2", "evaluation.every_samples=null"],
                ["evaluation.samples=${evaluation.batch_size},32", "evaluation.batch_size=16,32"],
                ["seed=sort(3,1,2)", "sweep_name=a-b"],
                ["~model.dropout", "seed=1,2"],
                ["model.hidden_sizes=[8],[8,8]", "model=mlp", "data=digits"],
            )
        ),
    ],
    ids=lambda lines: " ".join(lines) or "none",
)
def test_same_jobs_as_hydra(
    lines: list[str], grid: MakeGrid, hydra_jobs: Callable[..., list[dict[str, Any]]]
) -> None:
    ours = [cell.settings for cell in grid(*lines).cells]
    assert canonical(ours) == canonical(hydra_jobs(*lines))


@pytest.mark.slow
def test_lists_and_strings_in_a_sweep_file_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    cells = []
    for name, axes in {
        "lists": "{seed: [0, 1], batch.micro_batch_size: [4, null], model: [gpt_nano, gpt_micro]}",
        "text": '{seed: "0,1", batch.micro_batch_size: "4,null", model: "glob([gpt_n*,gpt_mic*])"}',
    }.items():
        (tmp_path / "sweeps" / f"{name}.yaml").write_text(
            f"# @package _global_\nhydra: {{sweeper: {{params: {axes}}}}}\n"
        )
        composed = compose(["--config-dir", str(tmp_path), f"sweeps={name}"], "batchscape sweep")
        assert composed is not None
        cells.append(canonical([cell.settings for cell in composed.cells]))
    assert len(cells[0]) == 8
    assert cells[0] == cells[1]


def test_values_of_a_sweep_file_may_be_lists_of_mappings(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    ramps = [[], [{"samples": 8, "global_batch_size": 4}, {"samples": 9, "global_batch_size": 3}]]
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        "# @package _global_\n"
        f"hydra: {{sweeper: {{params: {{batch.ramp: {json.dumps(ramps)}, seed: [0, 1]}}}}}}\n"
    )
    composed = compose(["--config-dir", str(tmp_path), "sweeps=mine"], "batchscape sweep")
    assert composed is not None
    values = [(cell.settings["batch"]["ramp"], cell.settings["seed"]) for cell in composed.cells]
    assert values == [(ramps[0], 0), (ramps[0], 1), (ramps[1], 0), (ramps[1], 1)]


def test_a_budget_may_be_the_sum_of_a_stage_and_a_window(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    ramps = [[{"samples": age, "global_batch_size": 8}] for age in (64, 128)]
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        f"# @package _global_\nbatch: {{ramp: {json.dumps(ramps[0])}}}\n"
        "budget: {samples: '${sum:${batch.ramp.0.samples},32,2}'}\n"
        f"hydra: {{sweeper: {{params: {{batch.ramp: {json.dumps(ramps)}}}}}}}\n"
    )
    composed = compose(["--config-dir", str(tmp_path), "sweeps=mine"], "batchscape sweep")
    assert composed is not None
    assert [cell.settings["budget"]["samples"] for cell in composed.cells] == [98, 162]


def test_command_line_replaces_the_axis_of_the_same_key(grid: MakeGrid) -> None:
    replaced = grid("sweeps=fixed_global_batch", "seed=7,8", "batch.micro_batch_size=16")
    assert {cell.settings["seed"] for cell in replaced.cells} == {7, 8}
    assert {cell.settings["batch"]["micro_batch_size"] for cell in replaced.cells} == {16}
    assert len(replaced.cells) == 2 * 3
    assert replaced.axis_keys == grid("sweeps=fixed_global_batch").axis_keys
    assert replaced.fixed == {"sweeps": "fixed_global_batch"}


def test_added_keys_reach_validation(grid: MakeGrid) -> None:
    (cell,) = grid("+optimizer.learning_rat=0.1").cells
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rat: unknown setting; did you mean learning_rate"
    ):
        RunConfig.from_mapping(cell.settings)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["optimizer.lr=0.1,0.2"], "optimizer.lr is no setting"),
        (["optimizer.lr=0.1"], "optimizer.lr is no setting"),
        (["micro_batch_size=1"], r"did you mean batch\.micro_batch_size"),
        (["seed=interval(1,0)"], "the lower one first"),
        (["seed=range(3,3)"], "there is no value"),
        (["sweeps=nothing"], r"sweeps has no option nothing.*fixed_global_batch"),
        (["sweeps=musev_224,learning_rate"], "one sweep file at a time"),
        (["+sweep=musev_224"], "sweeps=musev_224"),
        (["sweep=musev_224"], "sweeps=musev_224"),
        (["+sweeps=musev_224"], "sweeps=musev_224"),
        (["model=none"], r"model has no option none.*gpt_nano"),
        (["model=gpt_nano,none"], r"model has no option none.*gpt_nano"),
        (["hydra/sweeper=basic"], "expands sweeps itself"),
        (["hydra.mode=RUN"], "expands sweeps itself"),
        (["data=text"], r"data\.path="),
        (["data=stdlib,text"], r"data\.path="),
        (["seed=["], "cannot be read. A list is written"),
        (["seed=${nothing}"], "nothing"),
        (["--run"], "there is no option --run"),
        (["--resolve"], "in conjunction with --cfg"),
        (["batch=0"], "a group takes the name of one of its options"),
        (["--config-dir", "nowhere"], "not found"),
        (["--config-name", "nothing"], "there is no option --config-name"),
        (["-i", "all"], "there is no option -i"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told(lines: list[str], message: str, grid: MakeGrid) -> None:
    with pytest.raises(ConfigError, match=message):
        grid(*lines)


def test_thousands_of_cells_compose_once(grid: MakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    count = 0
    original = ConfigLoaderImpl.load_sweep_config

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counting)
    cells = grid(
        "seed=range(0,500)", "model=gpt_nano,gpt_micro", "batch.micro_batch_size=1,2,4,8,16"
    )
    assert len(cells.cells) == 5000
    assert count == 2


KEYS = """
seed batch.micro_batch_size batch.global_batch_size batch.data_parallel_size batch.nodes batch
batch.gradient_accumulation_steps model optimizer data optimizer.learning_rate schedule
optimizer.weight_decay budget.samples budget budget.optimizer_steps evaluation.every_samples
launcher sweeps launcher.device tracker.tags sweep_name optimizer.lr x timing_repeat
schedule.warmup_samples engine.precision model.hidden_sizes
"""
WORDS = """
0 1 2 7 8 32 64 3840 -1 0.5 1e-3 1e400 nan inf null true gpt_nano gpt_micro mlp digits text sgd
cosine auto cuda float64 local samples target 'a_b' [1,2] [] {a:1} ??? range(1,4) glob(*)
choice(1,2) interval(0,1) ${seed} ${x} '' 1,1 fixed_global_batch hold_global shuffle(1,2,3)
99999999999999999999 é
"""
key = st.sampled_from(KEYS.split())
value = st.lists(st.sampled_from(WORDS.split()), max_size=3).map(",".join)
prefix = st.sampled_from(["", "", "", "", "+", "++", "~"])
LINES = st.one_of(
    st.builds("{}{}={}".format, prefix, key, value),
    key.map("~{}".format),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
)


def plan_or_message(lines: list[str]) -> None:
    """Every command line has a valid plan, or one message."""

    def prepare(_: object) -> DataIdentity:
        return DataIdentity("content", "nowhere", 1437, 360, 256, task="next_token")

    message = None
    try:
        text = compose(lines, "batchscape plan") or pytest.fail("nothing asks for a show")
        plan = make_plan(text, Machine(2, "two cores"), prepare)
    except BatchscapeError as error:
        message = str(error)
    except SystemExit as leaving:
        message = f"usage was printed, code {leaving.code}"
    if message is not None:
        assert message.strip()
        assert "code 0" not in message
        return
    assert plan.specs
    assert len(plan.cells) + plan.repeated == len(text.cells)
    for spec in plan.specs:
        assert spec.samples == spec.optimizer_steps * spec.geometry.global_batch_size
        assert spec.config == RunConfig.from_mapping(spec.config.to_mapping())
    for rejection in plan.rejections:
        assert rejection.reason


# Every example composes anew: shrinking one would take minutes and hardly shorten a line.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


@pytest.mark.slow
@settings(max_examples=40, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(LINES, max_size=4))
def test_many_lines_have_a_plan_or_a_message(lines: list[str]) -> None:
    plan_or_message(lines)


def test_of_lines_with_one_key_the_last_one_counts(plan):
    again = plan("seed=0,1", "seed=3")
    assert len(again.specs) == 1
    assert again.sweep_name == plan("seed=3").sweep_name


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["seed=range(0,1000000000)"], "this range has 1,000,000,000 values"),
        (["seed=shuffle(range(0,1000000000))"], "this range has 1,000,000,000 values"),
        (["optimizer.learning_rate=range(0,1,1e-300)"], "this range has far more values"),
        (["optimizer.learning_rate=range(0,inf,1)"], "a range needs finite numbers"),
        (["seed=range(0,10,0)"], "the step of a range must not be 0"),
        (
            [f"{key}=range(1,1001)" for key in ("seed", "init_seed", "timing_repeat")],
            "given 1,000 of seed x 1,000 of init_seed x 1,000 of timing_repeat = 1,000,000,000",
        ),
    ],
)
def test_a_grid_without_end_is_refused_before_it_is_expanded(
    lines: list[str], message: str, grid: MakeGrid
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        grid(*lines)


@pytest.mark.parametrize("folder", [".", "my studies"])
def test_a_study_of_ones_own_is_named_with_what_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--config-dir DIR, as DIR/sweeps/mine\.yaml$"):
        compose(["sweeps=mine"], "batchscape plan")
    (tmp_path / folder / "sweeps").mkdir(parents=True)
    (tmp_path / folder / "sweeps" / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    with pytest.raises(ConfigError) as caught:
        compose(["sweeps=mine"], "batchscape plan")
    *_, hint = str(caught.value).splitlines()
    place = (Path(folder) / "sweeps" / "mine.yaml").as_posix()
    assert hint.startswith(f"There is {place}: add --config-dir ")
    option = shlex.split(hint.partition("add ")[2])
    assert compose([*option, "sweeps=mine"], "batchscape plan") is not None
