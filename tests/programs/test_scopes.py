"""Every setting of a command is in exactly the names that its type says, tried by changing it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from batchscape.config import Affects, Command, ExternalData
from batchscape.config.settings import settings_of

JSONL = {
    "kind": "jsonl",
    "path": "a",
    "columns": {"optimizer_step": "step", "loss": "loss", "step_time_s": "t"},
    "units": {"step_time_s": "s"},
    "loss_of": "other",
}
REGEX = {
    "kind": "regex",
    "pattern": r"(?P<optimizer_step>\d+) (?P<loss>\S+) (?P<step_time_s>\S+)",
    "units": {"step_time_s": "s"},
    "loss_of": "other",
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Command": (
        {"argv": ["{python}", "{x}"], "values": {"x": 1}, "metrics": {"kind": "recorder"}},
        {
            "argv": ["{python}", "{x}", "more"],
            "metrics": {"kind": "trainer_state"},
            "cwd": "other",
            "environment": {"A": "1"},
            "values": {"x": 2},
            "files": ["a.py"],
            "precision": "bfloat16",
            "max_devices": 7,
            "resumable": True,
        },
    ),
    "ExternalData": ({}, {"sequence_length": 16, "files": ["a.py"]}),
    "RecorderMetrics": ({"kind": "recorder"}, {"kind": "trainer_state"}),
    "TrainerStateMetrics": (
        {"kind": "trainer_state"},
        {"kind": "recorder", "path": "b", "eval_loss": "eval_b_loss"},
    ),
    "JsonlMetrics": (
        JSONL,
        {
            "kind": None,
            "path": "b",
            "columns": {**JSONL["columns"], "samples": "n"},
            "units": {"step_time_s": "ms"},
            "loss_of": "global_batch",
            "first_step": 0,
        },
    ),
    "RegexMetrics": (
        REGEX,
        {
            "kind": None,
            "pattern": "x" + REGEX["pattern"],
            "evaluation_pattern": r"(?P<optimizer_step>\d+) (?P<eval_loss>\S+)",
            "geometry_pattern": r"(?P<world_size>\d+)",
            "path": "b",
            "units": {"step_time_s": "ms"},
            "loss_of": "global_batch",
            "first_step": 0,
        },
    ),
}
"""A dataclass: settings that it needs, and another value a field."""
METRICS = get_args(get_args(get_type_hints(Command)["metrics"])[0]) or get_args(
    get_type_hints(Command)["metrics"]
)
OWNERS = [Command, ExternalData, *(m for m in METRICS if is_dataclass(m))]
CASES = [
    (owner, field.name)
    for owner in OWNERS
    for field in fields(owner)
    if field.name not in {"name", "kind"}
]


def test_every_setting_is_tried():
    assert {owner.__name__ for owner in OWNERS} == set(CHANGES)
    for owner in OWNERS:
        changes = set(CHANGES[owner.__name__][1]) - {"kind"}
        assert changes == {field.name for field in fields(owner)} - {"name", "kind"}, owner


@pytest.mark.parametrize(("owner", "name"), CASES, ids=[f"{o.__name__}.{n}" for o, n in CASES])
def test_a_setting_is_in_the_names_that_its_type_says(
    settings, plan, tmp_path, monkeypatch, owner, name
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "other").mkdir()
    base, changes = CHANGES[owner.__name__]

    def names(more: dict[str, Any]) -> tuple[str, str]:
        mapping = settings()
        if owner is ExternalData:
            mapping["data"] |= base | more
        elif owner is Command:
            mapping["engine"] |= base | more
        else:
            mapping["engine"]["metrics"] = base | more
        (spec,) = plan(mapping).specs
        return spec.trajectory_id, spec.run_id

    affects = Affects.NOTHING
    for setting in settings_of(owner):
        if setting.key.partition(".")[0] == name:
            affects |= setting.affects
    before, after = names({}), names({name: changes[name]})
    changed = [one != other for one, other in zip(before, after, strict=True)]
    assert changed == [Affects.LOSS in affects, affects != Affects.NOTHING]
