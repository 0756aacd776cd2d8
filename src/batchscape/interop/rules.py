"""The rules that files and command must keep to agree on the batch.

A rule takes what is stated and what would run, and yields the disagreements that it finds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from batchscape.interop.readers import FLAG_WORDS, KINDS, Statement, Value, differ
from batchscape.interop.resolve import Running, Setup, accelerate_mode, first_fact


@dataclass(frozen=True)
class Disagreement:
    """A disagreement, and how to mend it."""

    rule: str
    """Short name of the rule."""
    severity: Literal["error", "warning"]
    """`error`: the run refuses to start, or trains with another batch or arithmetic than a file
    says; `warning`: a trap that these files alone do not decide."""
    message: str
    """Files, keys and values, and the consequence in the library."""
    fix: str


def findings_of(setup: Setup, running: Running) -> list[Disagreement]:
    """Return every disagreement of a setup and its resolved batch, errors first."""
    findings = [finding for rule in _RULES for finding in rule(setup, running)]
    return sorted(findings, key=lambda finding: finding.severity)


def _processes(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """`accelerate launch` may start fewer processes than are asked for."""
    if setup.launched_by != "accelerate":
        return
    mode = accelerate_mode(setup)
    processes, nodes = (first_fact(name, *setup.of_accelerate) for name in ("devices", "nodes"))
    if processes is None:
        return
    if processes.value > 1 and not mode.starts_many:
        yield Disagreement(
            "one-process",
            "error",
            f"{processes.origin}, but one process runs, and no message says so: {mode.reason}",
            "start with torchrun --nproc_per_node, or with --multi_gpu or distributed_type "
            "MULTI_GPU on GPUs",
        )
    elif processes.value > 1 and not mode.is_certain:
        yield Disagreement(
            "one-process",
            "warning",
            f"{processes.origin}: {mode.reason}; else one process runs",
            "add --multi_gpu",
        )
    if nodes is not None and processes.value % nodes.value:
        each = processes.value // nodes.value
        yield Disagreement(
            "processes-per-machine",
            "error",
            f"{processes.origin} does not divide over {nodes.origin}: num_processes counts all "
            f"machines, and accelerate starts {each} on each, {each * nodes.value} in all",
            f"set num_processes to a multiple of {nodes.value}",
        )


def _visible(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """A machine may start more ranks than it has visible devices."""
    # An accelerate config beside another launcher is not read.
    readers = setup.of_accelerate if setup.launched_by == "accelerate" else (setup.launcher,)
    counts = [(one.others.get("gpu_ids"), f"{one.source}: gpu_ids") for one in readers if one]
    if setup.launcher is not None:
        others = setup.launcher.others
        counts += [(others["visible"], "CUDA_VISIBLE_DEVICES")]
        counts += [(others["job"].gpus_on_node, "the job")]
    count, origin = next(
        ((number, name) for number, name in counts if number is not None), (None, "")
    )
    processes, nodes = (first_fact(name, *setup.of_accelerate) for name in ("devices", "nodes"))
    if count is None or processes is None:
        return
    per_machine = processes.value // (nodes.value if nodes is not None else 1)
    if per_machine > count:
        yield Disagreement(
            "visible-devices",
            "error",
            f"{processes.origin} starts {per_machine} processes on a machine where {origin} "
            f"names {count} devices",
            "start one process per visible device, or make more visible",
        )


def _unread_config(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """Only `accelerate launch` reads an accelerate config."""
    launcher, config = setup.launcher, setup.accelerate
    if config is None or launcher is None or launcher.others["launcher"] == "accelerate":
        return
    of_config, of_launcher = config.devices, launcher.devices
    differs = differ(of_config, of_launcher)
    yield Disagreement(
        "unread-config",
        "error" if differs else "warning",
        f"{config.source} is read by accelerate launch alone, and the command starts with "
        f"{launcher.others['launcher']}"
        + (f": {config.quote(of_config)} is not {launcher.quote(of_launcher)}" if differs else ""),
        "start with accelerate launch --config_file, or leave the file out",
    )


def _devices_option(setup: Setup, running: Running) -> Iterator[Disagreement]:
    if setup.devices is None or running.devices is None or running.devices.origin == "--devices":
        return
    if running.devices.value != setup.devices:
        yield Disagreement(
            "devices",
            "error",
            f"--devices {setup.devices} is not {running.devices}",
            "leave --devices out: the files tell",
        )


def _job(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """A launcher and the job that it runs in may count other nodes or tasks."""
    launcher = setup.launcher
    if launcher is None or launcher.others["launcher"] == "python":
        return
    job, starter, nodes = launcher.others["job"], launcher.others["under"], launcher.nodes
    if job.nodes is not None and nodes is not None and nodes.value not in {None, job.nodes}:
        # One launcher alone may be meant for one of the nodes; one on each node is not.
        may_be_one_node = starter is None and (nodes.value or 1) < job.nodes
        yield Disagreement(
            "job-nodes",
            "warning" if may_be_one_node else "error",
            f"{launcher.quote(nodes)} is not the {job.nodes} nodes of the job"
            + ("; the others stay idle" if may_be_one_node else ""),
            f"set {nodes.key} to {job.nodes}, or #SBATCH --nodes to {nodes.value}",
        )
    tasks = job.tasks_on_node
    if starter is not None and tasks is not None and tasks > 1:
        yield Disagreement(
            "job-tasks",
            "error",
            f"{launcher.source}: {starter} starts {tasks} tasks on a node, and each of them a "
            "launcher with all of its processes",
            "start one task a node: --ntasks-per-node=1",
        )


def _shell_floor(setup: Setup, _: Running) -> Iterator[Disagreement]:
    for floor in setup.launch.floors if setup.launch is not None else ():
        yield Disagreement(
            "shell-floor",
            "error",
            f"{setup.launch.name if setup.launch else ''}: the script divides {floor}; a shell "
            "drops the remainder, and with it a part of the batch",
            "choose numbers that divide",
        )


def _misspelt(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """DeepSpeed ignores a key that it does not know, without a message."""
    json = setup.deepspeed
    for key, nearest in json.others["misspelt"].items() if json is not None else ():
        yield Disagreement(
            "unknown-key",
            "warning",
            f"{json.source if json else ''}: DeepSpeed has no key {key} and ignores it; nearest "
            f"is its {nearest}",
            f"write {nearest}, or remove {key}",
        )


def _auto_without_source(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """DeepSpeed itself knows no "auto": transformers and accelerate replace it."""
    json = setup.deepspeed
    # accelerate takes DataLoader and Accelerator, which a script may set from anything.
    if json is None or running.system in {"trainer", "accelerate"}:
        return
    values = (json.micro, json.accumulation, json.total)
    autos = [value.key for value in values if value is not None and value.is_auto]
    if not autos:
        return
    yield Disagreement(
        "auto-without-source",
        "error",
        f'{json.source}: {", ".join(autos)} "auto", and nothing here fills it in: DeepSpeed itself '
        "takes numbers only; the Trainer and accelerate replace it",
        "write numbers, or check it together with the command or TrainingArguments that it is "
        "used with",
    )


StatementPair = tuple[str, Statement | None, Statement | None, str]
"""A field, two statements that may differ in it, and the consequence."""
_FIRST_WINS = "the first overrides the second, and no message says so"


def _pairs(setup: Setup, running: Running) -> Iterator[StatementPair]:
    """Yield pairs of statements of one field, with the consequence of a difference."""
    json, program, is_trainer = setup.deepspeed, setup.program, setup.trainer is not None
    is_accelerate, mode = running.system == "accelerate", accelerate_mode(setup)
    refuses = "the Trainer refuses to start"
    reader = "accelerate" if is_accelerate else "DeepSpeed"
    for part in ("micro", "accumulation"):
        yield part, json, program, refuses if is_trainer else f"{reader} takes that of the JSON"
        yield part, setup.unread, program, "the script may take either"
    plugin = next((statement for statement in setup.of_accelerate if statement.clipping), None)
    clipping_program = program
    if program is not None and is_trainer and program.clipping is None:
        clipping_program = replace(program, clipping=Value(1.0, "max_grad_norm (default)"))
    source = json or (plugin if mode.deepspeed else None)
    yield (
        "clipping",
        source,
        clipping_program,
        refuses if is_trainer else "DeepSpeed takes the first",
    )
    # Command and file of `accelerate launch`, as far as there are both.
    first, second = (*setup.of_accelerate, None, None)[:2]
    if setup.launched_by == "accelerate":
        yield "devices", first, second, _FIRST_WINS
    if not is_accelerate and not is_trainer:
        return
    yield "accumulation", first, second, _FIRST_WINS
    source = next((statement for statement in setup.of_accelerate if statement.accumulation), None)
    consequence = refuses if is_trainer else _FIRST_WINS
    if not mode.deepspeed:
        consequence = "accelerate passes it on only with DeepSpeed, so that it has no effect"
    yield "accumulation", source, program, consequence
    source = next((statement for statement in setup.of_accelerate if statement.precision), None)
    if source is not None and source.precision is not None and source.precision.value != "no":
        yield "precision", source, program, "the arguments decide"
        if is_accelerate and json is not None and json.is_on("enabled_precision"):
            yield "precision", source, json, "accelerate refuses to start"


def _differences(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Two statements of one field may differ."""
    for part, first, second, consequence in _pairs(setup, running):
        one, other = getattr(first, part, None), getattr(second, part, None)
        if first is not None and second is not None and one and other and differ(one, other):
            yield Disagreement(
                "micro-batch" if part == "micro" else part,
                # Of the two sources of accelerate itself one is meant to win.
                "warning" if second is setup.accelerate else "error",
                f"{first.quote(one)} is not {second.quote(other)}; {consequence}",
                f"make both equal: {one.key} {other.value} in the {KINDS[first.kind]}, or "
                f"{other.key} {one.value}",
            )


def _unused_values(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """A file may not be read, and a number may be named for the batch without saying its unit."""
    if setup.unread is not None:
        yield Disagreement(
            "unread-file",
            "warning",
            f"{setup.unread.source}: not used, since the command states numbers itself and the "
            "script may not read this file",
            "state the numbers in one of the two",
        )
    for program in setup.programs:
        if not program.unused:
            continue
        option = f"--flag {program.unused[0].key}=WORD, one of {', '.join(FLAG_WORDS)}"
        yield Disagreement(
            "unused-number",
            "warning",
            f"{program.source}: {', '.join(map(str, program.unused))}: not used, since the name "
            "does not tell what is counted (samples or tokens, of a device or of all)",
            f"say it: {option}" if setup.launch is not None else "remove what the program ignores",
        )


def _tokens(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """A global batch that is read in samples may count tokens."""
    total = setup.program.total if setup.program is not None else None
    options = setup.launch.options if setup.launch is not None else {}
    length = next((key for key in options if re.search(r"seq.*len|block_size", key)), None)
    if total is not None and total.key in options and length and total.key != "global_batch_size":
        yield Disagreement(
            "samples-or-tokens",
            "warning",
            f"{total} is read in samples, and programs with {length} may count tokens there",
            f"if so: --flag {total.key}=global_batch_tokens --flag {length}=sequence_length",
        )


def _no_batch(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """DeepSpeed needs one of two keys, and nothing fills in a missing key."""
    json, program = setup.deepspeed, setup.program
    if json is None or json.micro is not None or json.total is not None:
        return
    stated = program.micro if program is not None else None
    yield Disagreement(
        "no-batch",
        "error",
        f"{json.source}: has neither train_batch_size nor train_micro_batch_size_per_gpu, and "
        "DeepSpeed does not start without one of them; nothing fills in a missing key",
        'add "train_micro_batch_size_per_gpu": '
        f"{'N' if stated is None or stated.value is None else stated.value} to the DeepSpeed JSON",
    )


def _accumulation_missing(setup: Setup, running: Running) -> Iterator[Disagreement]:
    json = setup.deepspeed
    program = setup.program if running.system in {"accelerate", "trainer"} else None
    steps = program.accumulation if program is not None else None
    if (
        json is None
        or program is None
        or json.accumulation is not None
        or (steps is None or (steps.value or 1) == 1)
    ):
        return
    consequence = (
        ", which is then 1 for DeepSpeed: it counts another global batch than the Trainer, "
        if setup.trainer is not None
        else "; accelerate then takes 1, and not "
    )
    yield Disagreement(
        "accumulation-missing",
        "error",
        f"{json.source}: has no gradient_accumulation_steps{consequence}{program.quote(steps)}",
        f'add "gradient_accumulation_steps": {steps.value} to the DeepSpeed JSON',
    )


def _total(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Every stated global batch must equal devices x micro-batch x accumulation."""
    if running.refusal is not None:
        facts = (running.total, running.micro, running.accumulation, running.devices)
        stated = ", ".join(fact.origin for fact in facts if fact is not None)
        nearest = ", ".join(map(str, running.refusal.nearest))
        yield Disagreement(
            "global-batch",
            "error",
            f"{stated}: {str(running.refusal).partition('; given')[0]}{_litgpt_remainder(running)}",
            "change one of the numbers"
            + (
                f"; devices x micro-batch x accumulation that would work: {nearest}" * bool(nearest)
            ),
        )
        return
    geometry, total = running.geometry, first_fact("total", setup.deepspeed, *setup.programs)
    factors = [
        fact for fact in (running.devices, running.micro, running.accumulation) if fact is not None
    ]
    product = math.prod(fact.value for fact in factors)
    if total is None:
        return
    micro = setup.program.micro if setup.program is not None else None
    remark = ""
    if micro is not None and micro.key == "train_batch_size":
        remark = (
            "; train_batch_size is the global batch in a DeepSpeed JSON, and the micro-batch of a "
            "device in arguments of accelerate scripts"
        )
    if geometry is not None and geometry.global_batch_size != total.value:
        yield Disagreement(
            "global-batch",
            "error",
            f"{total.origin} is not devices x micro-batch x accumulation = {geometry}{remark}",
            f"set it to {geometry.global_batch_size}, or change the others",
        )
    elif geometry is None and total.value % product:
        yield Disagreement(
            "global-batch",
            "error",
            f"{total.origin} is no multiple of {' x '.join(map(str, factors))} = {product}, "
            "whatever the others are",
            f"set it to a multiple of {product}",
        )


def _litgpt_remainder(running: Running) -> str:
    """Say what LitGPT trains with, which drops the remainder of global / devices / micro-batch."""
    total, micro, devices = running.total, running.micro, running.devices
    if running.system != "litgpt" or total is None or micro is None or devices is None:
        return ""
    steps = total.value // devices.value // micro.value
    batch = devices.value * micro.value * steps
    return f"; LitGPT {f'trains with {batch}' if steps else 'stops at an assertion'}"


def _precisions(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """One file may switch both precisions on, or two files different ones."""
    json, trainer = setup.deepspeed, setup.trainer
    with_both = [s for s in (setup.program, json) if s is not None and s.is_on("both_precisions")]
    for statement in with_both:
        yield Disagreement(
            "precision",
            "error",
            f"{statement.source}: fp16 and bf16 are both on, and only one of them can be",
            "switch one off",
        )
    if with_both:
        return
    is_auto = trainer is not None and trainer.precision is not None and trainer.precision.is_auto
    if json is not None and trainer is not None and not is_auto:
        precision = trainer.precision.value if trainer.precision is not None else None
        for name, enabled in json.others["enabled"].items():
            if enabled is None or enabled == (name == precision):
                continue
            yield Disagreement(
                "precision",
                "error",
                f"{json.source}: {name}.enabled is {str(enabled).lower()}, and {trainer.source} "
                f"says {precision or 'neither fp16 nor bf16'}; the Trainer refuses to start",
                f"set {name}.enabled to {str(not enabled).lower()} in the DeepSpeed JSON, or "
                f"change the arguments",
            )


def _fields_of_the_json(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """An accelerate config may hold settings that belong into the DeepSpeed JSON."""
    config = setup.accelerate
    if config is None or setup.deepspeed is None or not accelerate_mode(setup).deepspeed:
        return
    json_file = config.others.get("deepspeed_config_file") or (
        setup.launcher is not None and setup.launcher.others.get("deepspeed_config_file")
    )
    fields = config.others["deepspeed_fields"]
    on_command = setup.launcher is not None and setup.launcher.precision is not None
    if on_command:
        fields = tuple(name for name in fields if name != "mixed_precision")
    if not json_file or not fields:
        return
    yield Disagreement(
        "fields-of-the-json",
        "error",
        f"{config.source}: {', '.join(fields)} beside the DeepSpeed JSON {json_file}; accelerate "
        "refuses to start, since the JSON has to say them",
        f"move {', '.join(fields)} into the JSON",
    )


def _clipping(setup: Setup, _: Running) -> Iterator[Disagreement]:
    """DeepSpeed clips by its own key alone."""
    json, program = setup.deepspeed, setup.program
    if json is None:
        return
    if json.others.get("optimizer_max_grad_norm") is not None:
        yield Disagreement(
            "clipping",
            "warning",
            f"{json.source}: DeepSpeed does not clip by optimizer.params.max_grad_norm",
            "use gradient_clipping",
        )
    norm = program.clipping if program is not None else None
    if program is None or norm is None or json.clipping is not None or norm.value == 1.0:
        return
    yield Disagreement(
        "clipping",
        "error",
        f"{json.source}: has no gradient_clipping, so DeepSpeed clips at its default of 1.0, and "
        f"{program.quote(norm)} has no effect",
        f'add "gradient_clipping": {norm.value} to the DeepSpeed JSON',
    )


def _trainer_switches(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """Two switches of the Trainer change the meaning of its micro-batch."""
    trainer = setup.trainer
    if trainer is None:
        return
    devices, micro = running.devices, trainer.micro
    if trainer.is_on("split_batches") and micro is not None:
        if devices is not None and micro.value is not None and micro.value % devices.value:
            yield Disagreement(
                "split-batches",
                "error",
                f"{trainer.quote(micro)} does not divide over devices {devices}: with "
                "split_batches it is cut over all of them, and accelerate refuses to start",
                f"set {micro.key} to a multiple of {devices.value}, or split_batches to false",
            )
        else:
            yield Disagreement(
                "split-batches",
                "warning",
                f"{trainer.quote(micro)} is the batch of all devices together, since "
                "split_batches is on; without it, it is that of each",
                "set split_batches to false, so that the name says what it is",
            )
    if trainer.is_on("auto_find_batch_size"):
        yield Disagreement(
            "auto-find-batch-size",
            "warning",
            f"{trainer.source}: auto_find_batch_size makes the micro-batch smaller where memory "
            "runs out and keeps the accumulation, so that the global batch shrinks too",
            "find the micro-batch once, and switch it off",
        )


def _schedule(setup: Setup, running: Running) -> Iterator[Disagreement]:
    """A scheduler that `Accelerator.prepare` wraps advances once per process."""
    launch = setup.launch
    if running.system != "accelerate" or launch is None or setup.program is None:
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


_RULES: tuple[Callable[[Setup, Running], Iterator[Disagreement]], ...] = (
    _processes,
    _visible,
    _unread_config,
    _devices_option,
    _job,
    _shell_floor,
    _misspelt,
    _auto_without_source,
    _differences,
    _unused_values,
    _tokens,
    _no_batch,
    _accumulation_missing,
    _total,
    _precisions,
    _fields_of_the_json,
    _clipping,
    _trainer_switches,
    _schedule,
)
"""In the order in which a table shows their findings."""
