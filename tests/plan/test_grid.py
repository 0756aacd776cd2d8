"""The grid against Hydra's own sweeper: the same lines give the same jobs."""

import json
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.errors import ConfigError


def canonical(settings_of_cells):
    return sorted(json.dumps(one, sort_keys=True) for one in settings_of_cells)


@pytest.fixture
def hydra_jobs():
    """Expand by Hydra's basic sweeper and compose every job from scratch."""

    def jobs(*lines):
        with initialize_config_module("batchscape.conf", version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            parser = OverridesParser.create(config_loader=hydra.config_loader)
            (batch,) = BasicSweeper.split_arguments(parser.parse_overrides(list(lines)), None)
            composed = [hydra_compose("config", list(job)) for job in batch]
            return [OmegaConf.to_container(job, resolve=True) for job in composed]

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
                ["seed=range(0,3)", "optimizer.learning_rate=range(0.1,0.3,0.1)"],
                ["optimizer=sgd", "optimizer.momentum=0.5,0.9", "schedule=cosine,constant"],
                [
                    "batch={micro_batch_size: 2},{micro_batch_size: 4}",
                    "batch.micro_batch_size=8,16",
                ],
                ["model=gpt_nano,gpt_micro", "seed=1,2", "model.dropout=0.0,0.1"],
                ["tracker.tags=[a,b],[c]", "tracker.project='x y','z'"],
                ["batch.micro_batch_size=null,4", "++seed=1,2", "~model.dropout"],
                ["evaluation.samples=${evaluation.batch_size},32", "evaluation.batch_size=16,32"],
                ["seed=sort(3,1,2)", "sweep_name=a-b", "model=glob(gpt_m*)"],
            )
        ),
    ],
    ids=lambda lines: " ".join(lines) or "none",
)
def test_same_jobs_as_hydra(lines, grid, hydra_jobs):
    ours = [cell.settings for cell in grid(*lines).cells]
    assert canonical(ours) == canonical(hydra_jobs(*lines))


def test_values_of_a_sweep_file_may_be_lists_of_mappings(tmp_path):
    (tmp_path / "sweeps").mkdir()
    ramps = [[], [{"samples": 8, "global_batch_size": 4}, {"samples": 9, "global_batch_size": 3}]]
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        "# @package _global_\n"
        f"hydra: {{sweeper: {{params: {{batch.ramp: {json.dumps(ramps)}, seed: [0, 1]}}}}}}\n"
    )
    composed = compose(["--config-dir", str(tmp_path), "sweeps=mine"], "batchscape sweep")
    values = [(cell.settings["batch"]["ramp"], cell.settings["seed"]) for cell in composed.cells]
    assert values == [(ramps[0], 0), (ramps[0], 1), (ramps[1], 0), (ramps[1], 1)]


def test_a_budget_may_be_the_sum_of_a_stage_and_a_window(tmp_path):
    (tmp_path / "sweeps").mkdir()
    ramps = [[{"samples": age, "global_batch_size": 8}] for age in (64, 128)]
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        f"# @package _global_\nbatch: {{ramp: {json.dumps(ramps[0])}}}\n"
        "budget: {samples: '${sum:${batch.ramp.0.samples},32,2}'}\n"
        f"hydra: {{sweeper: {{params: {{batch.ramp: {json.dumps(ramps)}}}}}}}\n"
    )
    composed = compose(["--config-dir", str(tmp_path), "sweeps=mine"], "batchscape sweep")
    assert [cell.settings["budget"]["samples"] for cell in composed.cells] == [98, 162]


def test_command_line_replaces_the_axis_of_the_same_key(grid):
    replaced = grid("sweeps=fixed_global_batch", "seed=7,8", "batch.micro_batch_size=16")
    assert {cell.settings["seed"] for cell in replaced.cells} == {7, 8}
    assert {cell.settings["batch"]["micro_batch_size"] for cell in replaced.cells} == {16}
    assert len(replaced.cells) == 2 * 3
    assert replaced.axis_keys == grid("sweeps=fixed_global_batch").axis_keys
    assert replaced.fixed == {"sweeps": "fixed_global_batch"}


def test_added_keys_reach_validation(grid):
    (cell,) = grid("+optimizer.learning_rat=0.1").cells
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rat: unknown setting; did you mean learning_rate"
    ):
        RunConfig.from_mapping(cell.settings)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["optimizer.lr=0.1,0.2"], "optimizer.lr is no setting"),
        (["sweeps=musev_224,learning_rate"], "one sweep file at a time"),
        (["+sweep=musev_224"], "sweeps=musev_224"),
        (["+sweeps=musev_224"], "sweeps=musev_224"),
        (["model=gpt_nano,none"], r"model has no option none.*gpt_nano"),
        (["data=stdlib,text"], r"data\.path="),
        (["seed=["], "cannot be read. A list is written"),
        (["seed=${nothing}"], "nothing"),
        (["--run"], "there is no option --run"),
        (["--resolve"], "in conjunction with --cfg"),
        (["batch=0"], "a group takes the name of one of its options"),
        (["--config-name", "nothing"], "there is no option --config-name"),
        (["-i", "all"], "there is no option -i"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told(lines, message, grid):
    with pytest.raises(ConfigError, match=message):
        grid(*lines)


def test_cells_are_composed_once_per_choice_of_groups(grid, monkeypatch):
    composed = []
    original = ConfigLoaderImpl.load_sweep_config

    def counted(*arguments):
        composed.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", counted)
    cells = grid("seed=0,1,2", "model=gpt_nano,gpt_micro", "batch.micro_batch_size=1,2").cells
    assert (len(cells), len(composed)) == (12, 2)


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
def test_a_grid_without_end_is_refused_before_it_is_expanded(lines, message, grid):
    with pytest.raises(ConfigError, match=re.escape(message)):
        grid(*lines)


def test_a_study_of_ones_own_is_named_with_what_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--config-dir DIR, as DIR/sweeps/mine\.yaml$"):
        compose(["sweeps=mine"], "batchscape plan")
    place = Path("my studies", "sweeps", "mine.yaml")
    place.parent.mkdir(parents=True)
    place.write_text("# @package _global_\nseed: 3\n")
    with pytest.raises(ConfigError) as caught:
        compose(["sweeps=mine"], "batchscape plan")
    *_, hint = str(caught.value).splitlines()

    assert hint.startswith(f"There is {place}: add --config-dir ")
    option = shlex.split(hint.partition("add ")[2])
    assert compose([*option, "sweeps=mine"], "batchscape plan") is not None
