"""Where the numbers of a DeepSpeed JSON are not those of what reads it."""

from __future__ import annotations

from collections.abc import Iterator

from batchscape.interop.disagreement import Disagreement
from batchscape.interop.gather import Setup
from batchscape.interop.resolve import Running
from batchscape.interop.statements import Value, differ

__all__ = ["findings"]


def findings(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Yield what the JSON says otherwise than the arguments."""
    yield from _misspelt(setup)
    yield from _auto_without_source(setup, running)
    yield from _against_trainer(setup)
    yield from _against_script(setup, running)


def _misspelt(setup: Setup) -> Iterator[Disagreement]:
    """DeepSpeed passes over a key that it does not know, without a word."""
    names = None if setup.deepspeed is None else setup.deepspeed.others["misspelt"]
    if setup.deepspeed is None or not isinstance(names, dict):
        return
    for key, nearest in names.items():
        yield Disagreement(
            "unknown-key",
            "warning",
            f"{setup.deepspeed.source}: DeepSpeed knows no key {key} and passes over it; the "
            f"nearest that it knows is {nearest}",
            f"write {nearest}, or remove {key}",
        )


def _auto_without_source(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """DeepSpeed itself knows no "auto": transformers and accelerate fill it in before."""
    json = setup.deepspeed
    if json is None or running.system == "trainer":
        return
    values = [value for value in (json.micro, json.accumulation, json.total) if value is not None]
    autos = [value.key for value in values if value.is_auto]
    if not autos:
        return
    if running.system == "accelerate":
        # Filled from the DataLoader and the Accelerator, which a script may set from anything.
        return
    yield Disagreement(
        "auto-without-source",
        "error",
        f'{json.source}: {", ".join(autos)} "auto", and nothing here fills it in: DeepSpeed itself '
        "takes numbers only; the Trainer and accelerate replace it",
        "write numbers, or check it together with the command or TrainingArguments that it is "
        "used with",
    )


def _against_trainer(setup: Setup) -> Iterator[Disagreement]:
    """The Trainer compares both and refuses to start."""
    json, trainer = setup.deepspeed, setup.trainer
    if json is None or trainer is None:
        return
    pairs = (
        ("micro-batch", json.micro, trainer.micro),
        ("accumulation", json.accumulation, trainer.accumulation),
    )
    for rule, left, right in pairs:
        if differ(left, right):
            yield Disagreement(
                rule,
                "error",
                f"{json.name(left)} is not {trainer.name(right)}; the Trainer refuses to start",
                _equal(left, right),
            )
    steps = trainer.accumulation
    if json.accumulation is None and steps is not None and (steps.value or 1) > 1:
        yield Disagreement(
            "accumulation-missing",
            "error",
            f"{json.source}: has no gradient_accumulation_steps, which is then 1 for DeepSpeed: it "
            f"counts another global batch than the Trainer, {trainer.name(steps)}",
            f'add "gradient_accumulation_steps": {steps.value} to the DeepSpeed JSON',
        )


def _against_script(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """A script's own arguments beside a JSON with numbers: the JSON decides."""
    json, script = setup.deepspeed, setup.script
    if json is None or script is None:
        return
    pairs = (
        ("micro-batch", json.micro, script.micro),
        ("accumulation", json.accumulation, script.accumulation),
    )
    for rule, left, right in pairs:
        if differ(left, right):
            what = "accelerate" if running.system == "accelerate" else "DeepSpeed"
            yield Disagreement(
                rule,
                "error",
                f"{json.name(left)} is not {script.name(right)}; {what} goes by the JSON",
                _equal(left, right),
            )
    steps = script.accumulation
    missing = running.system == "accelerate" and json.accumulation is None
    if missing and steps is not None and (steps.value or 1) > 1:
        yield Disagreement(
            "accumulation-missing",
            "error",
            f"{json.source}: has no gradient_accumulation_steps; accelerate then takes 1, and not "
            f"{script.name(steps)}",
            f'add "gradient_accumulation_steps": {steps.value} to the DeepSpeed JSON',
        )


def _equal(json: Value[int] | None, other: Value[int] | None) -> str:
    """Return how to make two numbers one; "auto" would let any flag of a command line decide."""
    if json is None or other is None:
        return "make both equal"
    return (
        f"make both equal: {json.key} {other.value} in the DeepSpeed JSON, or {other.key} "
        f"{json.value}"
    )
