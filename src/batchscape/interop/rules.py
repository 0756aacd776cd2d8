"""Where files disagree on the numbers of the batch."""

from __future__ import annotations

from collections.abc import Iterator

from batchscape.errors import GeometryError
from batchscape.geometry import solve
from batchscape.interop import rules_deepspeed, rules_launch, rules_settings
from batchscape.interop.disagreement import Disagreement
from batchscape.interop.gather import Setup
from batchscape.interop.resolve import Running, accelerate_mode
from batchscape.interop.statements import Statement, differ

__all__ = ["findings_of"]

_SEVERAL = "the command wins; give the number in one place"


def findings_of(setup: Setup, running: Running) -> list[Disagreement]:
    """Return every disagreement, errors first.

    Parameters
    ----------
    running : Running
        As `resolve` gives it for the same setup.
    """
    found = [
        *rules_launch.findings(setup, running),
        *rules_deepspeed.findings(setup, running),
        *_accumulation_of_launcher(setup, running),
        *_unread_arguments(setup),
        *_total(setup, running),
        *_litgpt(running),
        *rules_settings.findings(setup, running),
    ]
    return sorted(found, key=lambda finding: finding.severity)


def _accumulation_of_launcher(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """The launcher carries an accumulation of its own, and only into DeepSpeed."""
    said = [statement for statement in setup.of_accelerate if statement.accumulation]
    if not said or running.system not in {"accelerate", "trainer"}:
        return
    if len(said) == 2 and differ(said[0].accumulation, said[1].accumulation):
        yield Disagreement(
            "accumulation",
            "warning",
            f"{said[0].name(said[0].accumulation)} goes before "
            f"{said[1].name(said[1].accumulation)}",
            _SEVERAL,
        )
    first = said[0]
    script = setup.trainer or setup.script
    theirs = script.accumulation if script is not None else None
    if script is None or not differ(first.accumulation, theirs):
        return
    if not accelerate_mode(setup).deepspeed:
        makes = "accelerate passes it on only with DeepSpeed, so that it has no effect"
    elif running.system == "trainer":
        makes = "the Trainer refuses to start"
    else:
        makes = "the launcher's goes before the script's, without a word"
    yield Disagreement(
        "accumulation",
        "error",
        f"{first.name(first.accumulation)} is not {script.name(theirs)}; {makes}",
        "remove it from the accelerate side, or make both equal",
    )


def _unread_arguments(setup: Setup) -> Iterator[Disagreement]:
    """A file of TrainingArguments beside a command that gives arguments itself."""
    used, unread = setup.trainer, setup.unread_trainer
    if used is None or unread is None:
        return
    for name in ("micro", "accumulation"):
        left, right = getattr(unread, name), getattr(used, name)
        if differ(left, right):
            yield Disagreement(
                "micro-batch" if name == "micro" else "accumulation",
                "error",
                f"{unread.name(left)} is not {used.name(right)}; the command does not name "
                "the file",
                "make both equal, or give the file as the only argument of the script",
            )


def _total(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Every stated number of samples per optimizer step against devices x micro x accumulation."""
    if running.system == "litgpt":
        return
    if running.unsolved:
        facts = (running.total, running.micro, running.accumulation, running.devices)
        stated = ", ".join(fact.origin for fact in facts if fact is not None)
        yield Disagreement(
            "global-batch",
            "error",
            f"{stated}: {running.unsolved.partition('; given')[0]}",
            _nearest(running) or "change one of the numbers so that it divides",
        )
        return
    for statement in (setup.deepspeed, setup.script):
        total = None if statement is None else statement.total
        if statement is None or total is None or total.value is None:
            continue
        product = _product(running)
        if product is not None and product != total.value:
            yield Disagreement(
                "global-batch",
                "error",
                f"{statement.name(total)} is not devices x micro-batch x accumulation = "
                f"{running.devices} x {running.micro} x {running.accumulation} = {product}"
                + _namesake(setup, statement),
                f"set {total.key} to {product}" + _alternatives(running, total.value),
            )
        elif running.devices is None and running.micro and running.accumulation:
            inner = running.micro.value * running.accumulation.value
            if total.value % inner:
                yield Disagreement(
                    "global-batch",
                    "error",
                    f"{statement.name(total)} is no multiple of micro-batch x accumulation = "
                    f"{running.micro} x {running.accumulation} = {inner}: no number of devices "
                    "fits",
                    f"set {total.key} to a multiple of {inner}",
                )


def _product(running: Running) -> int | None:
    if running.devices is None or running.micro is None or running.accumulation is None:
        return None
    return running.devices.value * running.micro.value * running.accumulation.value


def _namesake(setup: Setup, statement: Statement) -> str:
    """Explain `train_batch_size`, which is global in DeepSpeed and per device elsewhere."""
    micro = setup.script.micro if setup.script is not None else None
    total = statement.total
    if statement.kind != "deepspeed" or micro is None or total is None:
        return ""
    if micro.key == "train_batch_size" and micro.value == total.value:
        return (
            "; train_batch_size is the global batch in a DeepSpeed JSON, and the micro-batch of a "
            "device in arguments of accelerate scripts"
        )
    return ""


def _alternatives(running: Running, total: int) -> str:
    """Return geometries of the global batch that was asked for, on the devices there are."""
    devices, micro, steps = running.devices, running.micro, running.accumulation
    if devices is None or micro is None or steps is None:
        return ""
    per_device, remainder = divmod(total, devices.value)
    if remainder:
        return f" ({total} does not divide over {devices.value} devices)"
    if per_device % micro.value == 0:
        return f", or accumulation to {per_device // micro.value}"
    if per_device % steps.value == 0:
        return f", or the micro-batch to {per_device // steps.value}"
    return ""


def _nearest(running: Running) -> str:
    given = {
        "data_parallel_size": running.devices,
        "micro_batch_size": running.micro,
        "gradient_accumulation_steps": running.accumulation,
        "global_batch_size": running.total,
    }
    try:
        solve(**{name: fact.value for name, fact in given.items() if fact is not None})
    except GeometryError as error:
        shown = ", ".join(str(geometry) for geometry in error.nearest)
        return f"devices x micro-batch x accumulation that would work: {shown}" if shown else ""
    return ""


def _litgpt(running: Running) -> Iterator[Disagreement]:
    """LitGPT floors twice, without a word: global // devices // micro-batch."""
    devices, micro, total = running.devices, running.micro, running.total
    if running.system != "litgpt" or micro is None or total is None:
        return
    count = devices.value if devices is not None else 1
    unit = count * micro.value
    if total.value % unit == 0:
        return
    steps = total.value // count // micro.value
    said = f"global batch {total} is no multiple of devices {count} x micro-batch {micro}"
    below, above = total.value // unit * unit, (total.value // unit + 1) * unit
    if steps == 0:
        yield Disagreement(
            "litgpt-floor",
            "error",
            f"{said}, and smaller; LitGPT stops at an assertion",
            f"set train.global_batch_size to {above}",
        )
        return
    yield Disagreement(
        "litgpt-floor",
        "error",
        f"{said}; LitGPT drops the remainder and trains with {count * micro.value * steps}",
        f"set train.global_batch_size to {below} or {above}",
    )
