"""The process that predicts before a launch: real ones, that die, hang, and leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweeps_of_fakes import spec_named

from batchscape.launch import predictions
from batchscape.launch.processes import Spawned
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder

PLANTED = Path(__file__).with_name("planted_predictors.py")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask a planted predictor about two runs, of which one was predicted before."""
    monkeypatch.syspath_prepend(str(PLANTED.parent))
    sweep = SweepFolder(tmp_path / "sweep")
    predicted, other = spec_named("a-d1"), spec_named("b-d1")
    write_json(sweep.run(predicted.run_id).prediction, {"step_time_s": {"value": 1.0}})

    def ask(name: str, *, should_stop: Any = lambda: False) -> tuple[Any, Any]:
        monkeypatch.setattr(predictions, "PREDICTOR", f"planted_predictors:{name}")
        processes, scratch = Spawned(), tmp_path / name
        scratch.mkdir()
        try:
            return predictions.predict(
                [predicted, other],
                [predicted, other],
                sweep,
                processes,
                scratch,
                should_stop=should_stop,
            )
        finally:
            processes.close()

    return ask


KEPT = {"a-d1": {"step_time_s": {"value": 1.0}}}


def test_what_is_said_is_read_and_what_was_said_before_is_kept(ask: Any) -> None:
    predicted, trouble = ask("says")
    assert trouble is None
    assert predicted == {**KEPT, "b-d1": {"run_time_s": {"value": 7.0, "method": "x"}}}


@pytest.mark.parametrize(
    ("name", "why"),
    [("raises", "ValueError: planted"), ("leaves", "exit code 3"), ("is_killed", "exit code -9")],
)
def test_a_launch_goes_on_without_predictions(name: str, why: str, ask: Any) -> None:
    predicted, trouble = ask(name)
    assert predicted == KEPT
    assert "are not predicted" in trouble
    assert why in trouble


def test_one_that_hangs_is_ended(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_LONGEST_S", 0.3)
    assert "exit code -9" in ask("hangs")[1]
    monkeypatch.undo()


def test_one_that_hangs_ends_with_the_launch(ask: Any) -> None:
    assert ask("hangs", should_stop=lambda: True) == (KEPT, None)
