"""Settings are validated once, with one line a problem."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.config import OUR_GROUPS, Affects, RunConfig, affects_of, that_affect
from batchscape.errors import ConfigError


def plain(config_of):
    return config_of().to_mapping()


def refused(mapping):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(mapping)
    return str(caught.value)


def test_round_trip(config_of):
    config = config_of()
    assert RunConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("group", "key", "value", "message"),
    [
        ("batch", "micro_batch", 8, "micro_batch: unknown setting; did you mean micro_batch_size?"),
        ("batch", "micro_batch_size", 0, "batch.micro_batch_size: must be greater"),
        ("batch", "micro_batch_size", 8.0, "batch.micro_batch_size: must be a valid int"),
        ("batch", "micro_batch_size", True, "batch.micro_batch_size: must be a valid int"),
        ("batch", "micro_batch_size", "8", "batch.micro_batch_size: must be a valid int"),
        ("model", "n_heads", 5, "model: n_heads must divide d_model: 32 % 5 = 2"),
        ("model", "name", "gtp", "name must be one of 'gpt', 'llama', 'mlp', 'transformers'"),
        ("optimizer", "learning_rate", float("nan"), "optimizer.learning_rate: must be a finite"),
        ("optimizer", "learning_rate", -1.0, "optimizer.learning_rate: must be greater than 0"),
        ("optimizer", "momentum", 0.9, "optimizer.momentum: unknown setting"),
        ("budget", "samples", 64, "one of samples, tokens, optimizer_steps; got samples=64"),
        ("data", "sequence_length", 1, "data.sequence_length: must be greater"),
        ("engine", "precision", "fp32", "engine.precision: must be 'auto', 'float32'"),
    ],
)  # fmt: skip
def test_each_problem_is_named_where_the_user_wrote_it(config_of, group, key, value, message):
    mapping = plain(config_of)
    mapping[group][key] = value
    assert message in refused(mapping)


@pytest.mark.parametrize(
    ("group", "key", "value", "written"),
    [
        ("engine", "precision", "bf16", "bfloat16"),
        ("engine", "precision", "Float16", "float16"),
        ("launcher", "device", "cdua", "cuda"),
    ],
)  # fmt: skip
def test_a_value_in_other_words_is_answered_with_ours(config_of, group, key, value, written):
    mapping = plain(config_of)
    mapping[group][key] = value
    assert refused(mapping).endswith(f"; write {written}")
    mapping[group][key] = written
    RunConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("launcher", "timeout_s", "2h"),
        ("budget", "optimizer_steps", "many"),
        ("engine", "precision", "int8"),
    ],
)
def test_what_cannot_be_told_is_not_guessed(config_of, group, key, value):
    mapping = plain(config_of)
    mapping[group][key] = value
    assert "write" not in refused(mapping)


def test_all_problems_are_reported_at_once(config_of):
    mapping = plain(config_of)
    mapping["batch"]["micro_batch_size"] = -1
    mapping["model"]["n_layers"] = 0
    mapping["sweep"] = "x"
    message = refused(mapping)
    assert all(part in message for part in ("batch.micro_batch_size", "model.n_layers", "sweep:"))


def test_data_and_model_must_fit(config_of):
    mapping = plain(config_of)
    mapping["data"] = {"name": "digits"}
    assert "data=digits cannot feed model=gpt; use model=mlp" in refused(mapping)


def test_token_budgets_need_packed_text(config_of):
    mapping = plain(config_of)
    mapping["budget"] = {"tokens": 3200}
    RunConfig.from_mapping(mapping)
    mapping["data"]["layout"] = "padded"
    assert "needs packed text" in refused(mapping)


def test_seeds_derive_from_one(config_of):
    config = config_of(seed=7, data_seed=3)
    assert (config.resolved_init_seed, config.resolved_data_seed) == (7, 3)


@pytest.mark.parametrize(
    ("key", "affects"),
    [
        ("batch.micro_batch_size", Affects.MEMORY | Affects.TIME),
        ("optimizer.learning_rate", Affects.LOSS),
        ("model.n_layers", Affects.ALL),
        ("launcher.device", Affects.COST),
        ("launcher.jobs", Affects.NOTHING),
        ("model.settings.n_layer", Affects.ALL),
        ("data._target_", Affects.ALL),
        ("schedule", Affects.LOSS),
        ("measure", Affects.COST | Affects.RECORD),
        ("tracker", Affects.NOTHING),
        ("timing_repeat", Affects.RECORD),
        ("hardware", None),
        ("learning_rate", None),
    ],
)
def test_what_a_key_decides(key, affects):
    assert affects_of(key) == affects


def test_settings_of_a_run_by_what_they_decide(config_of):
    config = config_of()
    every = that_affect(config, Affects.ALL | Affects.RECORD)
    loss, other = (
        that_affect(config, Affects.LOSS),
        that_affect(config, Affects.COST | Affects.RECORD, without=Affects.LOSS),
    )
    for group, values in every.items():
        parts = loss.get(group, {}), other.get(group, {})
        if isinstance(values, dict):
            assert values == {**parts[0], **parts[1]}
            assert not set(parts[0]) & set(parts[1])
    assert "tracker" not in every
    assert "learning_rate" not in that_affect(config, Affects.MEMORY)["optimizer"]
    assert that_affect(config, Affects.TIME, for_program=True).keys().isdisjoint(OUR_GROUPS)


@given(
    st.sampled_from(["batch", "model", "data", "budget", "tracker", "seed"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
)
def test_any_value_of_a_group_is_accepted_or_refused_with_a_message(group, value):
    mapping = {"batch": {}, group: value}
    assert refused(mapping).startswith("The configuration breaks these rules:\n  ")


def test_what_json_cannot_carry_is_refused(config_of):
    mapping = plain(config_of)
    mapping["budget"]["optimizer_steps"] = object()
    assert "neither a number, a text, a list nor a mapping" in refused(mapping)
