"""What Hydra knows and nothing here reads is refused, with what to use in its place."""

import logging

import pytest

from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.errors import ConfigError
from batchscape.record.commands import hydra_text

UNREAD = {
    "hydra.run.dir=here": "sweep_dir=DIR",
    "hydra.sweep.subdir=x": "sweep_dir=DIR",
    "hydra.output_subdir=x": "config.json",
    "hydra.job.chdir=true": "engine.cwd=DIR",
    "+hydra.job.env_set.OMP_NUM_THREADS=1": "NAME=VALUE batchscape sweep",
    "hydra.job.env_copy=[HOME]": "the environment of the command",
    "hydra.verbose=true": "log.txt",
    "hydra/launcher=submitit_slurm": "launcher.concurrent_runs=N",
    "hydra/sweeper=basic": "expands sweeps itself",
    "hydra.mode=RUN": "expands sweeps itself",
}


@pytest.fixture(autouse=True)
def _log_level():
    """Restore what `hydra.verbose` sets for the whole process before it is refused."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        compose(arguments, "batchscape sweep")
    return str(caught.value)


def folder_of(*arguments):
    grid = compose(arguments, "batchscape sweep")
    # It is no setting of the runs, and changes no name.
    assert set(grid.fixed) <= {"sweep_dir", "sweeps"}
    (folder,) = {RunConfig.from_mapping(cell.settings).sweep_dir for cell in grid.cells}
    return folder


@pytest.mark.parametrize("argument", UNREAD)
def test_what_nothing_reads_is_refused_with_what_to_use(argument):
    error = refused(argument)
    assert error.startswith(argument.lstrip("+").partition("=")[0].replace("/job", ".job")[:13])
    assert UNREAD[argument] in error


@pytest.mark.parametrize(
    "argument",
    [
        "hydra/env=default",
        "~hydra.sweep.subdir",
        *(
            pytest.param(argument, marks=pytest.mark.slow)
            for argument in ("hydra.job.id=7", "+hydra.foo=1", "hydra.runtime.cwd=/x")
        ),
    ],
)
def test_no_other_setting_of_hydra_is_taken_in_silence(argument):
    error = refused(argument)
    assert argument in error or "has no effect" in error


def test_settings_of_hydra_that_are_read(tmp_path):
    text = "'it''s a \\ and \u2603'"
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "study.yaml").write_text(
        f"# @package _global_\nhydra: {{sweeper: {{params: {{sweep_name: [[{text}], 1]}}}}}}\n",
        encoding="utf-8",
    )
    grid = compose(
        [
            f"hydra.searchpath=[{hydra_text(f'file://{tmp_path}')}]",
            "+hydra.sweeper.params.seed=[0,1]",
            "sweeps=study",
        ],
        "batchscape sweep",
    )
    assert len(grid.cells) == 4
    assert grid.cells[0].settings["sweep_name"] == ["it's a \\ and \N{SNOWMAN}"]


@pytest.mark.slow
def test_a_setting_may_be_a_share_of_another_one_and_nothing_is_rounded():
    def decays(part):
        share = f'schedule.decay_samples="${{share:{part},${{budget.samples}}}}"'
        grid = compose(["schedule=wsd", share, "budget.samples=1024,2048"], "batchscape sweep")
        return [cell.settings["schedule"]["decay_samples"] for cell in grid.cells]

    assert decays(0.25) == [256, 512]
    assert all(isinstance(decay, int) for decay in decays(0.25))
    assert decays(0.3) == pytest.approx([307.2, 614.4])


def test_the_folder_of_a_sweep_in_the_words_of_hydra():
    assert folder_of() is None
    assert folder_of("hydra.sweep.dir=my/folder") == "my/folder"
    assert folder_of("hydra.sweep.dir=a b", "seed=0,1", "scaling=none,sqrt") == "a b"
    assert folder_of("hydra.sweep.dir=one", "sweep_dir=one") == "one"
    error = refused("hydra.sweep.dir=one", "sweep_dir=other")
    assert "hydra.sweep.dir=one and sweep_dir=other" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sweep: {dir: mine}", None),
        ("launcher: {n_jobs: 2}", "without the hydra"),
    ],
)
def test_a_study_of_ones_own_is_held_to_the_same(tmp_path, content, message):
    (tmp_path / "sweeps").mkdir()
    choice = "defaults: [{override /hydra/launcher: joblib}]\n" if "n_jobs" in content else ""
    text = (
        f"# @package _global_\n{choice}hydra:\n  {content}\n  sweeper: {{params: {{seed: [0]}}}}\n"
    )
    (tmp_path / "sweeps" / "study.yaml").write_text(text)
    arguments = ["--config-dir", str(tmp_path), "sweeps=study"]
    if message is None:
        assert folder_of(*arguments) == "mine"
    else:
        assert message in refused(*arguments)
