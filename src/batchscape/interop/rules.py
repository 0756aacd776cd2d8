"""The rules that files and command must keep to agree on the batch: one table, at the end.

A rule takes what is stated and what would run, and yields its findings: how bad, what, and how to
mend it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from batchscape.interop.resolve import Running, Setup, accelerate_mode
from batchscape.interop.sources import FLAG_WORDS, KINDS, Fact, Statement, count_of_ids, first_fact

Severity = Literal["error", "warning"]
"""`error`: the run refuses to start, or trains with another batch or arithmetic than a file says;
`warning`: a trap that these files alone do not decide."""
Findings = Iterator[tuple[Severity, str, str]]
"""Severity; files, keys and values with the consequence in the library; how to mend it."""


@dataclass(frozen=True)
class Disagreement:
    """A disagreement, and how to mend it."""

    rule: str
    """Short name of the rule."""
    severity: Severity
    message: str
    fix: str


def findings_of(setup: Setup, running: Running) -> list[Disagreement]:
    """Return every disagreement of a setup and its resolved batch, errors first."""
    findings = [
        Disagreement(name, *finding)
        for name, rule in RULES.items()
        for finding in rule(setup, running)
    ]
    return sorted(findings, key=lambda finding: finding.severity)


def _one_process(setup: Setup, _: Running) -> Findings:
    """`accelerate launch` may start one process, whatever is asked for."""
    mode, processes = accelerate_mode(setup), first_fact("devices", *setup.of_accelerate)
    if setup.launched_by != "accelerate" or not processes or processes.value == 1:
        return
    if mode.single:
        yield (
            "error",
            f"{processes.origin}, but one process runs, and no message says so: {mode.single}",
            "start with torchrun --nproc_per_node, or with --multi_gpu or distributed_type "
            "MULTI_GPU on GPUs",
        )
    elif not mode.is_certain:
        yield (
            "warning",
            f"{processes.origin}: without --multi_gpu, several processes start only where it finds "
            "several GPUs; else one process runs",
            "add --multi_gpu",
        )


def _processes_per_machine(setup: Setup, _: Running) -> Findings:
    processes, nodes = (first_fact(name, *setup.of_accelerate) for name in ("devices", "nodes"))
    if setup.launched_by == "accelerate" and processes and nodes:
        each, remainder = divmod(processes.value, nodes.value)
        if remainder:
            yield (
                "error",
                f"{processes.origin} does not divide over {nodes.origin}: num_processes counts all "
                f"machines, and accelerate starts {each} on each, {each * nodes.value} in all",
                f"set num_processes to a multiple of {nodes.value}",
            )


def _visible_devices(setup: Setup, _: Running) -> Findings:
    """A machine may start more ranks than it has visible devices."""
    by, visible = _visible_count(setup)
    processes, nodes = (first_fact(name, *setup.of_accelerate) for name in ("devices", "nodes"))
    each = processes.value // (nodes.value if nodes else 1) if processes else 0
    if processes and visible and each > visible:
        yield (
            "error",
            f"{processes.origin} starts {each} processes on a machine where "
            f"{by} names {visible} devices",
            "start one process per visible device, or make more visible",
        )


def _visible_count(setup: Setup) -> tuple[str, int | None]:
    """Return what says which devices are visible, and how many; of accelerate's own first."""
    places = setup.of_accelerate if setup.launched_by == "accelerate" else ()
    stated = [ids for one in places if (ids := one.others.get("gpu_ids")) is not None]
    if stated and stated[0] != "all":
        return "gpu_ids", count_of_ids(stated[0])
    if setup.launch.visible:
        return "CUDA_VISIBLE_DEVICES", setup.launch.visible
    return "the job", setup.launch.job.gpus_on_node


def _unread_config(setup: Setup, _: Running) -> Findings:
    """Only `accelerate launch` reads an accelerate config."""
    if setup.accelerate and setup.launched_by != "accelerate":
        processes, launched = (first_fact("devices", one) for one in setup.of_accelerate[::-1])
        differs = processes and launched and processes.value != launched.value
        yield (
            "error" if differs else "warning",
            f"{setup.accelerate.source} is read by accelerate launch alone, and the command starts "
            f"with {setup.launched_by}"
            + (
                f": {processes.origin} is not {launched.origin}"
                if processes and launched and differs
                else ""
            ),
            "start with accelerate launch --config_file, or leave the file out",
        )


def _devices(setup: Setup, running: Running) -> Findings:
    if setup.devices and running.devices and running.devices.value != setup.devices:
        yield (
            "error",
            f"--devices {setup.devices} is not {running.devices}",
            "leave --devices out: the files tell",
        )


def _job_nodes(setup: Setup, _: Running) -> Findings:
    """A launcher and the job that it runs in may count other nodes."""
    launch, nodes = setup.launch, first_fact("nodes", setup.launch.statement)
    in_job = launch.job.nodes
    if nodes and in_job and nodes.value != in_job:
        # One launcher alone may be meant for one of the nodes; one on each node is not.
        may_be_one_node = not launch.task_starter and nodes.value < in_job
        yield (
            "warning" if may_be_one_node else "error",
            f"{nodes.origin} is not the {in_job} nodes of the job"
            + "; the others stay idle" * may_be_one_node,
            f"set {nodes.key} to {in_job}, or #SBATCH --nodes to {nodes.value}",
        )


def _job_tasks(setup: Setup, _: Running) -> Findings:
    """Each of several tasks may start a launcher with all of its processes."""
    launch, tasks = setup.launch, setup.launch.job.tasks_on_node
    if launch.task_starter and launch.launcher != "python" and tasks and tasks > 1:
        yield (
            "error",
            f"{launch.name}: {launch.task_starter} starts {tasks} tasks on a node, and each "
            "task starts a launcher with all its processes",
            "start one task a node: --ntasks-per-node=1",
        )


def _shell_floor(setup: Setup, _: Running) -> Findings:
    for floor in setup.launch.floors:
        yield (
            "error",
            f"{setup.launch.name}: the script divides {floor}; a shell drops the remainder, and "
            "with it a part of the batch",
            "choose numbers that divide",
        )


def _unknown_key(setup: Setup, _: Running) -> Findings:
    """DeepSpeed ignores a key that it does not know, without a message."""
    for key, nearest in setup.deepspeed.others.get("misspelt", {}).items():
        yield (
            "warning",
            f"{setup.deepspeed.source}: DeepSpeed has no key {key} and ignores it; nearest is its "
            f"{nearest}",
            f"write {nearest}, or remove {key}",
        )


def _auto_without_source(setup: Setup, running: Running) -> Findings:
    """DeepSpeed itself knows no "auto": transformers and accelerate replace it."""
    facts = (setup.deepspeed.facts.get(part) for part in ("micro", "accumulation", "total"))
    autos = [fact.key for fact in facts if fact and fact.value is None]
    # accelerate takes DataLoader and Accelerator, which a script may set from anything.
    if autos and running.system not in {"trainer", "accelerate"}:
        yield (
            "error",
            f'{setup.deepspeed.source}: {", ".join(autos)} "auto", and nothing here fills it in: '
            "DeepSpeed itself takes numbers only; the Trainer and accelerate replace it",
            "write numbers, or check it together with the command or TrainingArguments that it is "
            "used with",
        )


def _difference(part: str, first: Statement, second: Statement, consequence: str) -> Findings:
    one, other = first_fact(part, first), first_fact(part, second)
    if one and other and one.value != other.value:
        yield (
            "error",
            f"{one.origin} is not {other.origin}; {consequence}",
            f"make both equal: {one.key} {other.value} in the {KINDS[first.kind].title}, or "
            f"{other.key} {one.value}",
        )


def _reader_of_the_json(setup: Setup, running: Running) -> str:
    """Say what becomes of a number that is not that of the DeepSpeed JSON."""
    if setup.trainer:
        return "the Trainer refuses to start"
    reader = "accelerate" if running.system == "accelerate" else "DeepSpeed"
    return f"{reader} takes that of the JSON"


def _micro_batch(setup: Setup, running: Running, part: str = "micro") -> Findings:
    consequence = _reader_of_the_json(setup, running)
    yield from _difference(part, setup.deepspeed, setup.program, consequence)
    yield from _difference(part, setup.unread, setup.program, "the script may take either")


def _accumulation(setup: Setup, running: Running) -> Findings:
    yield from _micro_batch(setup, running, "accumulation")
    if setup.trainer:
        consequence = "the Trainer refuses to start"
    elif running.system == "accelerate":
        consequence = "the first overrides the second, and no message says so"
    else:
        return
    if not accelerate_mode(setup).deepspeed:
        consequence = "accelerate passes it on only with DeepSpeed, so that it has no effect"
    launched = [one for one in setup.of_accelerate if one.states("accumulation")]
    for statement in launched[:1]:
        yield from _difference("accumulation", statement, setup.program, consequence)


def _unread_file(setup: Setup, _: Running) -> Findings:
    if setup.unread:
        yield (
            "warning",
            f"{setup.unread.source}: not used, since the command states numbers itself and the "
            "script may not read this file",
            "state the numbers in one of the two",
        )


def _unused_number(setup: Setup, _: Running) -> Findings:
    """A number may be named for the batch without saying its unit."""
    for program in setup.programs:
        if program.unused:
            option = f"--flag {program.unused[0].key}=WORD, one of {', '.join(FLAG_WORDS)}"
            yield (
                "warning",
                f"{program.source}: {', '.join(fact.stated for fact in program.unused)}: not used, "
                "since the name does not tell what is counted (samples or tokens, of a device or "
                "of all)",
                f"say it: {option}" if setup.launch else "remove what the program ignores",
            )


def _samples_or_tokens(setup: Setup, _: Running) -> Findings:
    """A global batch that is read in samples may count tokens."""
    total, length = setup.launch.script.facts.get("total"), setup.launch.length
    if total and length and total.key.isidentifier() and total.key != "global_batch_size":
        yield (
            "warning",
            f"{total.stated} is read in samples, and programs with {length} may count tokens there",
            f"if so: --flag {total.key}=global_batch_tokens --flag {length}=sequence_length",
        )


def _no_batch(setup: Setup, _: Running) -> Findings:
    """DeepSpeed needs one of two keys, and nothing fills in a missing key."""
    json, micro = setup.deepspeed, first_fact("micro", setup.program)
    if json and not json.states("micro", "total"):
        yield (
            "error",
            f"{json.source}: has neither train_batch_size nor train_micro_batch_size_per_gpu, and "
            "DeepSpeed does not start without one of them; nothing fills in a missing key",
            f'add "train_micro_batch_size_per_gpu": {micro.value if micro else "N"} to the '
            "DeepSpeed JSON",
        )


def _accumulation_missing(setup: Setup, running: Running) -> Findings:
    json, steps = setup.deepspeed, first_fact("accumulation", setup.program)
    consequences = {
        "trainer": ", which is then 1 for DeepSpeed: it counts another global batch than the "
        "Trainer, ",
        "accelerate": "; accelerate then takes 1, and not ",
    }
    consequence = consequences.get(running.system)
    if consequence and json and not json.states("accumulation") and steps and steps.value > 1:
        yield (
            "error",
            f"{json.source}: has no gradient_accumulation_steps{consequence}{steps.origin}",
            f'add "gradient_accumulation_steps": {steps.value} to the DeepSpeed JSON',
        )


def _global_batch(setup: Setup, running: Running) -> Findings:
    """Every stated global batch must equal devices x micro-batch x accumulation."""
    factors = [fact for fact in (running.devices, running.micro, running.accumulation) if fact]
    product = math.prod(fact.value for fact in factors)
    geometry, total = running.geometry, first_fact("total", setup.deepspeed, *setup.programs)
    if running.refusal:
        origins = ", ".join(fact.origin for fact in (running.total, *factors) if fact)
        nearest = ", ".join(map(str, running.refusal.nearest))
        would_work = f"; devices x micro-batch x accumulation that would work: {nearest}"
        yield (
            "error",
            f"{origins}: {str(running.refusal).partition('; given')[0]}"
            + _litgpt_remainder(running),
            "change one of the numbers" + would_work * bool(nearest),
        )
    elif geometry and total and geometry.global_batch_size != total.value:
        micro = first_fact("micro", setup.program)
        remark = (
            "; train_batch_size is the global batch in a DeepSpeed JSON, and the micro-batch of a "
            "device in arguments of accelerate scripts"
        )
        yield (
            "error",
            f"{total.origin} is not devices x micro-batch x accumulation = {geometry}"
            + (remark if micro and micro.key == "train_batch_size" else ""),
            f"set it to {geometry.global_batch_size}, or change the others",
        )
    elif total and geometry is None and total.value % product:
        yield (
            "error",
            f"{total.origin} is no multiple of {' x '.join(map(str, factors))} = {product}, "
            "whatever the others are",
            f"set it to a multiple of {product}",
        )


def _litgpt_remainder(running: Running) -> str:
    """Say what LitGPT trains with, which drops the remainder of global / devices / micro-batch."""
    total, micro, devices = running.total, running.micro, running.devices
    if running.system != "litgpt" or not (total and micro and devices):
        return ""
    each = devices.value * micro.value
    steps = total.value // each
    return f"; LitGPT {f'trains with {each * steps}' if steps else 'stops at an assertion'}"


def _precision(setup: Setup, _: Running) -> Findings:
    """One file may switch both precisions on, or JSON and Trainer different ones."""
    for one in (setup.trainer, setup.deepspeed):
        if [*one.others.get("halves", {}).values()] == [True, True]:
            yield (
                "error",
                f"{one.source}: fp16 and bf16 are both on, and only one of them can be",
                "switch one off",
            )
            return
    of_trainer = setup.trainer.others.get("halves", {})
    of_json = setup.deepspeed.others.get("halves", {})
    for key, is_on in of_json.items() if setup.trainer and None not in of_trainer.values() else ():
        if is_on not in {None, of_trainer.get(key.removesuffix(".enabled"), False)}:
            yield (
                "error",
                f"{setup.deepspeed.source}: {key} is {str(is_on).lower()}, and "
                f"{setup.trainer.source} says otherwise; the Trainer refuses to start",
                f"set {key} to {str(not is_on).lower()} in the DeepSpeed JSON, or change the "
                "arguments",
            )


def _fields_of_the_json(setup: Setup, _: Running) -> Findings:
    """An accelerate config may hold settings that belong into the DeepSpeed JSON."""
    # One on the command line is passed on.
    switches = {"mixed_precision"} & setup.launch.statement.others.get("switches", set())
    fields = sorted({*setup.accelerate.others.get("fields_of_the_json", ())} - switches)
    names = {str(one.others.get("deepspeed")).lower() for one in setup.of_accelerate} - {"none"}
    if setup.deepspeed and names and fields and accelerate_mode(setup).deepspeed:
        yield (
            "error",
            f"{setup.accelerate.source}: {', '.join(fields)} beside the DeepSpeed JSON "
            f"{setup.deepspeed.source}; accelerate refuses to start, since the JSON has to say "
            "them",
            f"move {', '.join(fields)} into the JSON",
        )


def _clipping(setup: Setup, running: Running) -> Findings:
    """DeepSpeed clips by its own key alone."""
    json, program = setup.deepspeed, setup.program
    norm = first_fact("clipping", program)
    if setup.trainer and not norm:
        norm = Fact(1.0, "max_grad_norm (default)", program.source)
    if json and norm and norm.value != 1.0 and not json.states("clipping"):
        yield (
            "error",
            f"{json.source}: has no gradient_clipping, so DeepSpeed clips at its default of 1.0, "
            f"and {norm.origin} has no effect",
            f'add "gradient_clipping": {norm.value} to the DeepSpeed JSON',
        )
    if norm:
        program = replace(program, facts={"clipping": norm})
        yield from _difference("clipping", json, program, _reader_of_the_json(setup, running))


def _split_batches(setup: Setup, running: Running) -> Findings:
    """The Trainer's micro-batch may be that of all devices together."""
    micro, devices = first_fact("micro", setup.trainer), running.devices
    if not micro or not setup.trainer.others["split_batches"]:
        return
    if devices and micro.value % devices.value:
        yield (
            "error",
            f"{micro.origin} does not divide over devices {devices}: with split_batches it is cut "
            "over all of them, and accelerate refuses to start",
            f"set {micro.key} to a multiple of {devices.value}, or split_batches to false",
        )
    else:
        yield (
            "warning",
            f"{micro.origin} is the batch of all devices together, since split_batches is on; "
            "without it, it is that of each",
            "set split_batches to false, so that the name says what it is",
        )


def _auto_find_batch_size(setup: Setup, _: Running) -> Findings:
    if setup.trainer.others.get("auto_find_batch_size"):
        yield (
            "warning",
            f"{setup.trainer.source}: auto_find_batch_size makes the micro-batch smaller where "
            "memory runs out and keeps the accumulation, so that the global batch shrinks too",
            "find the micro-batch once, and switch it off",
        )


RULES: dict[str, Callable[[Setup, Running], Findings]] = {
    "one-process": _one_process,
    "processes-per-machine": _processes_per_machine,
    "visible-devices": _visible_devices,
    "unread-config": _unread_config,
    "devices": _devices,
    "job-nodes": _job_nodes,
    "job-tasks": _job_tasks,
    "shell-floor": _shell_floor,
    "unknown-key": _unknown_key,
    "auto-without-source": _auto_without_source,
    "micro-batch": _micro_batch,
    "accumulation": _accumulation,
    "unread-file": _unread_file,
    "unused-number": _unused_number,
    "samples-or-tokens": _samples_or_tokens,
    "no-batch": _no_batch,
    "accumulation-missing": _accumulation_missing,
    "global-batch": _global_batch,
    "precision": _precision,
    "fields-of-the-json": _fields_of_the_json,
    "clipping": _clipping,
    "split-batches": _split_batches,
    "auto-find-batch-size": _auto_find_batch_size,
}
"""In the order in which a table shows their findings."""
