"""Where files disagree on arithmetic, clipping and schedules, or set traps for the batch."""

from __future__ import annotations

from collections.abc import Iterator

from batchscape.interop.disagreement import Disagreement
from batchscape.interop.gather import Setup
from batchscape.interop.resolve import Running, accelerate_mode

__all__ = ["findings"]


def findings(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Yield disagreements on settings beside the batch."""
    yield from _both_precisions(setup)
    yield from _precisions(setup, running)
    yield from _fields_of_the_json(setup)
    yield from _clipping(setup, running)
    yield from _split_batches(setup, running)
    yield from _finds_batch_size(setup)
    yield from _schedule(setup, running)


def _both_precisions(setup: Setup) -> Iterator[Disagreement]:
    for statement in (setup.trainer, setup.deepspeed):
        if statement is not None and statement.on("both_precisions"):
            yield Disagreement(
                "precision",
                "error",
                f"{statement.source}: fp16 and bf16 are both on, and only one of them can be",
                "switch one off",
            )


def _precisions(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Arithmetic that two sides state, and state differently."""
    json, trainer = setup.deepspeed, setup.trainer
    if any(s is not None and s.on("both_precisions") for s in (json, trainer)):
        return
    if json is not None and trainer is not None:
        ours = trainer.precision.value if trainer.precision is not None else None
        stated = json.others["enabled"]
        for name, enabled in stated.items() if isinstance(stated, dict) else ():
            if enabled is None or enabled == (name == ours):
                continue
            yield Disagreement(
                "precision",
                "error",
                f"{json.source}: {name}.enabled is {str(enabled).lower()}, and {trainer.source} "
                f"says {ours or 'neither fp16 nor bf16'}; the Trainer refuses to start",
                f"set {name}.enabled to {str(not enabled).lower()} in the DeepSpeed JSON, or "
                f"change the arguments",
            )
    first = next((said for said in setup.of_accelerate if said.precision), None)
    if first is None or first.precision is None or first.precision.value in {None, "no"}:
        return
    theirs, sets = (trainer or setup.script), first.precision.value
    mine = theirs.precision if theirs is not None else None
    if mine is not None and theirs is not None and mine.value not in {None, sets}:
        winner = (
            "arguments decide" if running.system == "trainer" else "script's own setting decides"
        )
        yield Disagreement(
            "precision",
            "error",
            f"{first.name(first.precision)} is not {theirs.name(mine)}; the {winner}",
            "state it in one place",
        )
    said = json.precision if json is not None else None
    uses_json = running.system == "accelerate" and json is not None
    if uses_json and said is not None and said.value not in {None, "no", sets} and json:
        yield Disagreement(
            "precision",
            "error",
            f"{first.name(first.precision)}, and {json.source}: {said.key} is on; accelerate "
            "refuses to start",
            "state it in the DeepSpeed JSON alone",
        )


def _fields_of_the_json(setup: Setup) -> Iterator[Disagreement]:
    """An accelerate config may not hold settings beside the JSON that they belong into."""
    config = setup.accelerate
    if config is None or setup.deepspeed is None or not accelerate_mode(setup).deepspeed:
        return
    named = config.others.get("deepspeed_config_file") or (
        setup.launcher is not None and setup.launcher.others.get("deepspeed_config_file")
    )
    fields = config.others["deepspeed_fields"]
    on_command = setup.launcher is not None and setup.launcher.precision is not None
    if isinstance(fields, tuple) and on_command:
        fields = tuple(name for name in fields if name != "mixed_precision")
    if not named or not isinstance(fields, tuple) or not fields:
        return
    yield Disagreement(
        "fields-of-the-json",
        "error",
        f"{config.source}: {', '.join(fields)} beside the DeepSpeed JSON {named}; accelerate "
        "refuses to start, since the JSON has to say them",
        f"move {', '.join(fields)} into the JSON",
    )


def _clipping(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """With DeepSpeed the gradient is clipped by its own value alone."""
    json = setup.deepspeed
    optimizer = json.others.get("optimizer_max_grad_norm") if json is not None else None
    if json is not None and optimizer is not None:
        yield Disagreement(
            "clipping",
            "warning",
            f"{json.source}: optimizer.params.max_grad_norm clips nothing in DeepSpeed",
            "use gradient_clipping",
        )
    script = setup.trainer or setup.script
    theirs = script.clipping if script is not None else None
    if script is None or theirs is None or theirs.value is None:
        return
    plugin = next((said for said in setup.of_accelerate if said.clipping), None)
    by_plugin = running.system in {"trainer", "accelerate"} and json is None and plugin is not None
    source = plugin if by_plugin and accelerate_mode(setup).deepspeed else json
    if source is None:
        return
    ours = source.clipping
    if ours is not None and ours.value is not None and ours.value != theirs.value:
        makes = "the Trainer refuses to start" if setup.trainer else "DeepSpeed goes by the first"
        yield Disagreement(
            "clipping",
            "error",
            f"{source.name(ours)} is not {script.name(theirs)}; {makes}",
            f"make both equal: {ours.key} {theirs.value} in the DeepSpeed JSON, or {theirs.key} "
            f"{ours.value}",
        )
    elif ours is None and source is json and theirs.value != 1.0:
        yield Disagreement(
            "clipping",
            "error",
            f"{source.source}: has no gradient_clipping, so DeepSpeed clips at its default of 1.0, "
            f"and {script.name(theirs)} has no effect",
            f'add "gradient_clipping": {theirs.value} to the DeepSpeed JSON',
        )


def _split_batches(setup: Setup, running: Running) -> Iterator[Disagreement]:
    trainer = setup.trainer
    if trainer is None or not trainer.on("split_batches") or trainer.micro is None:
        return
    devices, micro = running.devices, trainer.micro
    if devices is not None and micro.value is not None and micro.value % devices.value:
        yield Disagreement(
            "split-batches",
            "error",
            f"{trainer.name(micro)} does not divide over devices {devices}: with split_batches it "
            "is cut over all of them, and accelerate refuses to start",
            f"set {micro.key} to a multiple of {devices.value}, or split_batches to false",
        )
    else:
        yield Disagreement(
            "split-batches",
            "warning",
            f"{trainer.name(micro)} is the batch of all devices together, since split_batches is "
            "on; without it, it is that of each",
            "set split_batches to false, so that the name says what it is",
        )


def _finds_batch_size(setup: Setup) -> Iterator[Disagreement]:
    trainer = setup.trainer
    if trainer is not None and trainer.on("auto_find_batch_size"):
        yield Disagreement(
            "auto-find-batch-size",
            "warning",
            f"{trainer.source}: auto_find_batch_size makes the micro-batch smaller where memory "
            "runs out and keeps the accumulation, so that the global batch shrinks too",
            "find the micro-batch once, and switch it off",
        )


def _schedule(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """A scheduler that `Accelerator.prepare` wraps steps once per process."""
    launch = setup.launch
    if running.system != "accelerate" or launch is None or setup.script is None:
        return
    devices = running.devices.value if running.devices is not None else 1
    warmup = launch.options.get("lr_warmup_steps", launch.options.get("num_warmup_steps", "0"))
    decays = launch.options.get("lr_scheduler", launch.options.get("lr_scheduler_type", "constant"))
    if devices > 1 and (decays != "constant" or warmup not in {"0", ""}):
        yield Disagreement(
            "schedule-per-process",
            "warning",
            f"{launch.name}: a scheduler that accelerate prepares steps {devices} times per "
            f"optimizer step, once per process: lr_scheduler {decays}, warm-up {warmup}",
            "multiply warm-up and total steps by accelerator.num_processes in the script (many do) "
            "or pass step_scheduler_with_optimizer=False and step it yourself",
        )
