"""The state of a Hugging Face `Trainer`, and our callback beside it, of real trainings."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from batchscape.config import Metrics
from batchscape.errors import BatchscapeError, RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics import Log, open_reader
from batchscape.recorder import RUN_DIR_VARIABLE
from forked_programs import run_torchrun
from warm_interpreter import WarmInterpreter

ADAPTER: TypeAdapter[Any] = TypeAdapter(Metrics)
STATE = ADAPTER.validate_json('{"kind": "trainer_state", "path": "out"}')
RECORDER = ADAPTER.validate_json('{"kind": "recorder"}')

SCRIPT = """
import json, os, sys, warnings
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from batchscape.transformers_callback import BatchscapeCallback

def train(run_dir, samples, poison=False, sets=(), held_out="eval_loss", **settings):
    os.environ[sys.argv[2]] = run_dir
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (samples, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=None, eos_token_id=None,
    ))
    if poison:
        model.lm_head.weight.data[0] = float("nan")
    arguments = TrainingArguments(
        output_dir=os.path.join(run_dir, "out"), use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", **settings,
    )
    held = {name: data[k : k + 8] for k, name in enumerate(sets)} or data[:8]
    callbacks = [BatchscapeCallback(eval_loss=held_out)]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=held, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in told if "batchscape" in str(warning.message)]
    open(os.path.join(run_dir, "told.json"), "w").write(json.dumps(said))
    trainer.save_state()

for settings in json.loads(sys.argv[1]):
    train(**settings)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of a wrapped model may abort an interpreter that is taken down
"""
USUAL = {"logging_steps": 1, "samples": 64, "gradient_accumulation_steps": 2}
USUAL["per_device_train_batch_size"] = 4
EVALUATED = {
    "max_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "include_num_input_tokens_seen": "all",
}
ALONE: dict[str, dict[str, Any]] = {
    # 5 micro-batches an epoch: the third optimizer step has one of them, and half the samples.
    "ends within": {"samples": 20, "num_train_epochs": 1},
    "not full": {"samples": 18, "num_train_epochs": 1, "gradient_accumulation_steps": 1},
    "means": {"max_steps": 5, "logging_steps": 2},
    "no number": {"max_steps": 2, "poison": True},
    "two sets": {"sets": ["easy", "hard"], "held_out": "eval_hard_loss", **EVALUATED},
    "not named": {"sets": ["easy", "hard"], **EVALUATED},
    "one set": {"sets": ["only"], **EVALUATED},
}


Training = Callable[..., None]


@pytest.fixture(scope="module")
def train(warm_libraries: WarmInterpreter) -> Training:
    """Run Trainers one after the other on some ranks, which have imported the libraries."""
    return partial(run_trainers, warm_libraries)


def run_trainers(
    warm: WarmInterpreter, folder: Path, trainings: dict[str, dict[str, Any]], ranks: int = 1
) -> None:
    """Do it in ranks that are forked from a process."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    settings = []
    for name, arguments in trainings.items():
        (folder / name).mkdir()
        settings.append(USUAL | arguments | {"run_dir": str(folder / name)})
    arguments = [json.dumps(settings), RUN_DIR_VARIABLE]
    run_torchrun(warm, script, *arguments, ranks=ranks, folder=folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, train: Training) -> Path:
    """Trainings of one rank, in one process; what they leave is read only."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, ALONE)
    return folder


def read(config: Any, run_dir: Path, *sizes: int, length: int | None = 16) -> Log:
    return open_reader(config, run_dir, BatchGeometry(1, *sizes), length).read(final=True)


@pytest.mark.systems
def test_two_ranks_of_a_real_trainer(tmp_path: Path, train: Training) -> None:
    settings = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "include_num_input_tokens_seen": "all",
    }
    train(tmp_path, {"two": settings}, ranks=2)
    run_dir = tmp_path / "two"
    history = json.loads((run_dir / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 4
    state = read(STATE, run_dir, 2, 4, 2)
    recorded = read(RECORDER, run_dir, 2, 4, 2)
    for log in (state, recorded):
        assert [row["loss"] for row in log.steps] == losses
        assert [row["samples"] for row in log.steps] == [16, 32, 48, 64]
        assert [row["tokens"] for row in log.steps] == [256, 512, 768, 1024]
        assert [row["optimizer_step"] for row in log.evals] == [2, 4]
        assert observed(log)["micro_batch_size"] == 4
        assert log.problems == []
        assert all(row["gradient_norm"] > 0 for row in log.steps)
    assert observed(recorded)["world_size"] == 2
    assert observed(recorded)["gradient_accumulation_steps"] == 2
    assert observed(state)["tokens_per_optimizer_step"] == 256
    assert observed(state)["global_batch_size"] == 16
    assert [row["learning_rate"] for row in state.steps] == pytest.approx(
        [5e-5, 3.75e-5, 2.5e-5, 1.25e-5]
    )
    # An evaluation lies before the third step: how long the step took is not in the state.
    assert ["step_time_s" in row for row in state.steps] == [True, True, False, True]
    assert all(row["step_time_s"] > 0 for row in recorded.steps)


@pytest.mark.systems
def test_an_epoch_that_ends_within_an_optimizer_step_is_found(alone: Path) -> None:
    (problem,) = read(RECORDER, alone / "ends within", 1, 4, 2).problems
    assert "optimizer step 3 took 1 micro-steps instead of 2" in problem
    # The state alone tells that 20 samples in 3 steps are no whole global batch.
    log = read(STATE, alone / "ends within", 1, 4, 2)
    assert "global_batch_size" not in observed(log)


@pytest.mark.systems
def test_a_last_micro_batch_that_is_not_full_is_found(alone: Path) -> None:
    (problem,) = read(RECORDER, alone / "not full", 1, 4, 1).problems
    assert "the last micro-batch of an epoch had 2 samples" in problem


@pytest.mark.systems
def test_a_mean_over_several_steps_is_the_loss_of_none(alone: Path) -> None:
    for config in (STATE, RECORDER):
        log = read(config, alone / "means", 1, 4, 2)
        assert log.steps[-1]["optimizer_step"] == 5
        assert not any("loss" in row for row in log.steps)
        assert "missing" in log.sources["loss"]
    steps = read(RECORDER, alone / "means", 1, 4, 2).steps
    assert [row["optimizer_step"] for row in steps] == [1, 2, 3, 4, 5]
    assert all("step_time_s" in row for row in steps)


@pytest.mark.systems
def test_a_loss_that_is_no_number_is_seen_through_the_filter(alone: Path) -> None:
    for config in (STATE, RECORDER):
        log = read(config, alone / "no number", 1, 4, 2)
        assert all(math.isnan(row["loss"]) for row in log.steps)


def observed(log: Log) -> dict[str, int]:
    return dict(log.readings.keys())


def state_of(eval_loss: str) -> Any:
    text = {"kind": "trainer_state", "path": "out", "eval_loss": eval_loss}
    return ADAPTER.validate_json(json.dumps(text))


def history_of(run_dir: Path, key: str) -> list[float]:
    history = json.loads((run_dir / "out" / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in history if key in entry]


@pytest.mark.systems
def test_the_held_out_loss_of_one_of_several_sets(alone: Path) -> None:
    run_dir = alone / "two sets"
    hard = history_of(run_dir, "eval_hard_loss")
    assert len(hard) == 3
    assert hard != history_of(run_dir, "eval_easy_loss")
    of_hard = state_of("eval_hard_loss")
    for config in (of_hard, RECORDER):
        log = read(config, run_dir, 1, 4, 2)
        assert [row["eval_loss"] for row in log.evals] == hard
    with pytest.raises(RecordError, match="has no eval_x, but eval_easy_loss, eval_hard_loss"):
        read(state_of("eval_x"), run_dir, 1, 4, 2)


@pytest.mark.systems
def test_several_sets_of_which_none_is_named_are_told(alone: Path) -> None:
    log = read(STATE, alone / "not named", 1, 4, 2)
    assert log.evals == []
    assert "several, eval_easy_loss, eval_hard_loss; say which" in log.sources["eval_loss"]
    (message,) = json.loads((alone / "not named" / "told.json").read_text())
    assert "say which by BatchscapeCallback(eval_loss=...)" in message
    only = read(STATE, alone / "one set", 1, 4, 2)
    assert [row["eval_loss"] for row in only.evals] == history_of(
        alone / "one set", "eval_only_loss"
    )


def state(run_dir: Path, *history: dict[str, Any], **fields: Any) -> None:
    (run_dir / "out").mkdir(exist_ok=True)
    step = max((entry.get("step", 0) for entry in history), default=0)
    content = {"global_step": step, "log_history": list(history), "train_batch_size": 4} | fields
    (run_dir / "out" / "trainer_state.json").write_text(json.dumps(content))


def test_the_filter_s_zero_is_no_loss(tmp_path: Path) -> None:
    # What transformers 5.23 logs for a loss of NaN, as long as logging_nan_inf_filter is on.
    state(
        tmp_path,
        {"step": 1, "loss": 2.0, "grad_norm": 1.0},
        {"step": 2, "loss": 0.0, "grad_norm": math.nan},
        {"step": 3, "loss": 1.5, "grad_norm": math.nan},
    )
    first, second, third = read(STATE, tmp_path, 1, 4, 2).steps
    assert first["loss"] == 2.0
    assert math.isnan(second["loss"])
    assert "loss" not in third


def test_a_checkpoint_is_in_no_time_of_a_step(tmp_path: Path) -> None:
    """That of step 2 is written before the clock is read again, which is at step 3."""
    entries = [{"step": n, "loss": 2.0, "train_runtime": float(n)} for n in range(1, 5)]
    state(tmp_path, *entries, save_steps=2)
    timed = [row.get("step_time_s") for row in read(STATE, tmp_path, 1, 4, 2).steps]
    assert timed == [1.0, 1.0, None, None]
    state(tmp_path, *entries)
    timed = [row.get("step_time_s") for row in read(STATE, tmp_path, 1, 4, 2).steps]
    assert timed == [1.0] * 4


def test_the_time_of_every_evaluation_set_is_none_of_the_training(tmp_path: Path) -> None:
    """By hand: of 10 s until step 2, one set took 2 s and the other 3 s."""
    state(
        tmp_path,
        {"step": 1, "loss": 2.0, "train_runtime": 1.0},
        {"step": 1, "eval_a_loss": 1.0, "eval_a_runtime": 2.0},
        {"step": 1, "eval_b_loss": 1.0, "eval_b_runtime": 3.0},
        {"step": 2, "loss": 2.0, "train_runtime": 10.0},
    )
    timed = [row["train_time_s"] for row in read(state_of("eval_b_loss"), tmp_path, 1, 4, 2).steps]
    assert timed == [1.0, 5.0]


@pytest.mark.parametrize(("best", "evaluated"), [("out/checkpoint-2", [2]), (None, [2, 4])])
def test_the_best_model_is_not_that_of_the_last_step(tmp_path: Path, best, evaluated) -> None:
    end = {"step": 4, "train_loss": 1.0}
    entries = ({"step": 2, "eval_loss": 1.0}, end, {"step": 4, "eval_loss": 0.5})
    state(tmp_path, *entries, best_model_checkpoint=best)
    log = read(STATE, tmp_path, 1, 4, 2)
    assert [row["optimizer_step"] for row in log.evals] == evaluated


@pytest.mark.parametrize(
    "other",
    [
        {"step": 3, "test_loss": 9.0, "test_runtime": 1.0},
        {"step": 2, "eval_x_loss": 7.0, "eval_x_runtime": 1.0},
    ],
)
@pytest.mark.parametrize("runtime", [{}, {"eval_runtime": 1.0}])
def test_the_loss_of_another_set_is_not_the_held_out_one(
    tmp_path: Path, other: dict[str, float], runtime: dict[str, float]
) -> None:
    held_out = [{"step": k, "eval_loss": loss} | runtime for k, loss in ((1, 2.0), (3, 1.0))]
    state(tmp_path, *({"step": k, "loss": 3.0} for k in (1, 2, 3)), *held_out, other)
    log = read(STATE, tmp_path, 1, 4, 2)
    assert [(row["optimizer_step"], row["eval_loss"]) for row in log.evals] == [(1, 2.0), (3, 1.0)]
    assert "eval_loss" not in log.sources


@pytest.mark.parametrize(
    ("key", "evaluated", "source"),
    [
        ("test", [], None),
        ("predict", [], None),
        ("eval_x", [7.0], "the held-out loss is eval_x_loss, of the only evaluation set"),
    ],
)
def test_the_only_loss_is_the_held_out_one_where_its_name_says_so(
    tmp_path: Path, key: str, evaluated: list[float], source: str | None
) -> None:
    only = {"step": 2, f"{key}_loss": 7.0, f"{key}_runtime": 1.0}
    state(tmp_path, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 3.0}, only)
    log = read(STATE, tmp_path, 1, 4, 2)
    assert [row["eval_loss"] for row in log.evals] == evaluated
    assert log.sources.get("eval_loss") == source


def test_a_step_that_is_logged_twice_has_one_loss(tmp_path: Path) -> None:
    """A script that logs a `loss` of its own in each micro-batch has no step's."""
    entries = [{"step": k, "loss": 3.0} for k in (1, 1, 2)]
    state(tmp_path, *entries)
    log = read(STATE, tmp_path, 1, 4, 2)
    assert [row["loss"] for row in log.steps] == [3.0, 3.0]
    assert log.sources["optimizer_step"].startswith("optimizer steps 1 to 1 come again")
    state(tmp_path, *entries, {"step": 2, "loss": 4.0})
    with pytest.raises(RecordError, match="step 2 comes again with another loss, 3 and then 4"):
        read(STATE, tmp_path, 1, 4, 2)


def test_processes_and_samples_are_counted(tmp_path: Path) -> None:
    rates = {"train_loss": 1.0, "train_samples_per_second": 90.0, "train_steps_per_second": 5.0}
    state(tmp_path, {"step": 2, "loss": 2.0}, {"step": 2, **rates})
    checkpoint = tmp_path / "out" / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "rng_state.pth").touch()
    log = read(STATE, tmp_path, 1, 4, 4)
    assert observed(log)["world_size"] == 1
    assert observed(log)["global_batch_size"] == 18


def test_rates_too_coarse_for_one_whole_number_tell_nothing(tmp_path: Path) -> None:
    rates = {"train_loss": 1.0, "train_samples_per_second": 0.3, "train_steps_per_second": 0.005}
    state(tmp_path, {"step": 2, "loss": 2.0}, {"step": 2, **rates})
    assert "global_batch_size" not in observed(read(STATE, tmp_path, 1, 4, 2))


def test_the_latest_checkpoint_is_read_where_there_is_no_last_state(tmp_path: Path) -> None:
    for step in (2, 10):
        state(tmp_path, {"step": step, "loss": 2.0})
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir()
        (tmp_path / "out" / "trainer_state.json").rename(folder / "trainer_state.json")
        for rank in range(3):
            (folder / f"rng_state_{rank}.pth").touch()
    log = read(STATE, tmp_path, 3, 4, 2)
    assert log.steps[-1]["optimizer_step"] == 10
    assert observed(log)["world_size"] == 3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"log_history": [{"loss": 1.0}]}, r"\[0\]: optimizer_step should be a number, got None"),
        ({"log_history": [{"step": 1, "loss": "x"}]}, "loss should be a number, got 'x'"),
        ({"global_step": "x"}, "is no state of a Trainer: global_step should be a number"),
    ],
)
def test_states_that_cannot_be_right(tmp_path: Path, fields: dict[str, Any], match: str) -> None:
    state(tmp_path, **fields)
    with pytest.raises(RecordError, match=match):
        read(STATE, tmp_path, 1, 4, 2)


def test_a_half_written_state_waits(tmp_path: Path) -> None:
    state(tmp_path, {"step": 1, "loss": 2.0})
    path = tmp_path / "out" / "trainer_state.json"
    path.write_text(path.read_text()[:-5])
    reader = open_reader(STATE, tmp_path, BatchGeometry(1, 1, 4, 2), None)
    assert reader.read() == Log()
    with pytest.raises(RecordError, match="is no state of a Trainer"):
        reader.read(final=True)
    path.unlink()
    with pytest.raises(RecordError, match=r"call trainer\.save_state\(\)"):
        reader.read(final=True)


values = st.none() | st.booleans() | st.integers(-1, 5) | st.floats() | st.text(max_size=3)
names = ["step", "loss", "eval_loss", "eval_runtime", "grad_norm", "train_runtime", "train_loss"]
more = ["num_input_tokens_seen", "train_samples_per_second", "train_steps_per_second"]


@pytest.mark.slow
@given(
    history=st.lists(st.dictionaries(st.sampled_from(names + more), values), max_size=4),
    fields=st.dictionaries(st.sampled_from(["save_steps", "train_batch_size"]), values),
)
def test_garbage_in_a_state_is_a_log_or_an_error(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[dict[str, Any]],
    fields: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("state")
    state(folder, log_history=history, global_step=3, **fields)
    with contextlib.suppress(BatchscapeError):
        assert isinstance(read(STATE, folder, 1, 4, 2), Log)
