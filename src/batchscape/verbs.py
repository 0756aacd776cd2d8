"""What each verb does and takes, in the words of its help, from which its options are read.

A line that begins with two spaces and `--name` or `NAME` declares an option, or plain words.
Behind an option stands its kind (`_KINDS`), or its choices as `a|b`, and behind that a mark: `...`
takes several of a kind, `[NAME ...]` also none, and `[1.0]` is the default.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from batchscape.errors import ConfigError
from batchscape.text import suggest

HELP = """\
batchscape: how should I cut my batch? devices x micro-batch x accumulation, measured.

  batchscape sweep    run every combination of settings, and skip what is done
  batchscape run      run one combination
  batchscape plan     show what a sweep would run, and run nothing
  batchscape probe    the largest micro-batch that fits, by a few short trainings
  batchscape status   how far the runs of a sweep are
  batchscape cancel   end the jobs that a sweep has on a cluster
  batchscape report   tables and figures of finished sweeps
  batchscape view     the page of a sweep in a browser, while it runs
  batchscape analyze  the same statistics on a table of your own: curves, or steps to target
  batchscape recommend  which geometry to use, why, and what a wrong choice costs; also before a run
  batchscape sync     upload runs that Weights & Biases does not have yet
  batchscape doctor   what this machine has, what is missing, and how to repair it
  batchscape check-config  whether files and launch command agree on the batch
  batchscape configs  write such files from one geometry
  batchscape geometry  list every way to cut a global batch

Each verb has its --help. Settings are Hydra overrides: key=value, group=option; `python -m
batchscape --multirun ...` is the same as `batchscape sweep ...`. All settings, each with what it
means and what it takes: batchscape run --cfg job

Example:
  batchscape sweep sweeps=fixed_global_batch
  batchscape report outputs/fixed_global_batch
"""

_SETTINGS = """
Settings:
  key=value               one setting, such as optimizer.learning_rate=0.003
  group=option            one of batch, model, data, optimizer, schedule, scaling, budget,
                          evaluation, engine, device, cluster, loader, checkpoint, measure,
                          search, launcher, tracker
  --config-dir DIR        a folder with options and sweeps of your own
  --cfg job               show the settings instead, each with what it means and takes
"""

_TEXTS = {
    "sweep": """\
usage: batchscape sweep [key=value ...]

Run every combination of settings. Cells whose geometry cannot be built are rejected with a reason.
The folder is outputs/NAME: the same command skips runs that have ended and goes on with the
others; a second one beside it shares the work. What ended by a fault is repeated with --retry.
Exit code: 0, also with rejected runs; 1 if a run failed; 2 for bad settings; 130 if interrupted.

Examples:
  batchscape sweep sweeps=fixed_global_batch
  batchscape sweep batch.global_batch_size=32,64 batch.micro_batch_size=4,8 seed=0,1,2

  sweeps=NAME             a study, from sweeps/NAME.yaml
  --retry STATUS,...      repeat runs that ended as failed, oom or timeout before; or all
  key=a,b,c               an axis; also key=range(start,stop,step) and group=glob(*)
  key='interval(a,b)'     searched between two ends, with search=gp (or tpe, random, grid); by
                          ratios as key='tag(log,interval(a,b))'; docs/searching.md
""",
    "run": """\
usage: batchscape run [key=value ...]

Run one combination of settings.

Example:
  batchscape run batch.micro_batch_size=8 model=gpt_micro
""",
    "plan": """\
usage: batchscape plan [key=value ...]

Show the runs that `batchscape sweep` would launch with the same arguments, the rejected runs with
their reasons, and what runs and sweep will take: step time, device-hours, end. Launches
nothing and writes nothing but the cache of prepared data.

Examples:
  batchscape plan sweeps=musev_224
  batchscape plan sweeps=musev_224 cluster=h100_80g cluster.nodes=2 batch.nodes=2

  --json                  print all of it as JSON
  --runs DIR (repeated)   predict from the runs of a sweep, beside those of the plan's own folder
  cluster=NAME            a machine that is declared in conf/cluster/; this one by default
""",
    "probe": """\
usage: batchscape probe [key=value ...]

Find the largest micro-batch that fits, with the global batch and the devices held: a few trainings
of three optimizer steps, begun where the predicted memory says. They are runs of outputs/probe, so
the same command knows them. On a CPU give the limit of memory that the answer is for.

Example:
  batchscape probe batch.global_batch_size=256 device.memory_limit_gib=0.5

  --json                  print all of it as JSON
""",
    "status": """\
usage: batchscape status DIR [--json]

Show what a sweep has done, what runs now, what failed and why, and what the same command would do
next; also while it runs. docs/statuses.md explains the words.

Example:
  batchscape status outputs/fixed_global_batch

  DIR                     folder of a sweep
  --json                  print all of it as JSON
""",
    "cancel": """\
usage: batchscape cancel DIR

End the jobs of a sweep that launcher=slurm has submitted. Runs at work are asked for a checkpoint;
the same command goes on with them later.

Example:
  batchscape cancel outputs/fixed_global_batch

  DIR                     folder of a sweep
""",
    "report": """\
usage: batchscape report DIR [DIR ...] [--out DIR] [--target LOSS ...] [--columns NAME,NAME]

Write a page, tables and figures of sweeps, and print what they say.

Example:
  batchscape report outputs/fixed_global_batch

  DIR ...                 folders of sweeps
  --out DIR               where to write; default: DIR/report; needed for several DIRs
  --target LOSS ...       held-out losses to reach; default: chosen from what every global batch
                          reached
  --columns NAME,NAME     figures of the comparison, in this order, as in step_time_s,final_loss;
                          default: all that were recorded
""",
    "view": """\
usage: batchscape view DIR [DIR ...] [--port N]

Serve the page of sweeps to a browser on this machine, and make it anew as runs end. Nothing is
written into their folders. Ctrl-C ends it, with code 0.

Example:
  batchscape view outputs/fixed_global_batch

  DIR ...                 folders of sweeps
  --port N [0]            0: a free one
""",
    "analyze": """\
usage: batchscape analyze TABLE [--target LOSS ...] [--group COLUMN ...] [--out DIR] [option ...]

Fit how optimizer steps trade against the global batch in a table of your own: loss curves, or steps
to a target loss, one row a measurement or run; or seek the learning rates of the lowest final
losses. Columns: docs/analysis_tables.md.

Example:
  batchscape analyze steps.csv --group model --reference-batch 256

  TABLE                   .csv, .tsv, .parquet or .jsonl
  --target LOSS ...       losses to reach; default: chosen from curves, or all that the table has
  --group COLUMN ...      columns that runs must agree in; a column `group` is always one
  --column NAME=COLUMN (repeated)
                          which column of the table is NAME, where that cannot be told
  --minimise loss|steps   final losses, or steps to a target; default: loss where every run has one
                          loss
  --nan missing|diverged  what a loss of NaN is; default: text and JSON say, and what does not is
                          asked about
  --first-step 0|1        number of the first optimizer step in the table; default: 1, asked about
                          where runs may show 0
  --crossing sustained|first|first_evaluation [sustained]
                          when a curve reaches a target: for good, at first, or at the first
                          evaluation as measured, which is AlgoPerf's rule
  --form two_term|free_exponent
                          form of the trade-off that the answer rests on; default: the one that is
                          trusted, with a free exponent from four batch sizes on
  --overhead SHARE [0.2]  samples above those at the reference batch that are accepted
  --reference-batch SAMPLES
                          the batch that the overhead is counted from; default: the smallest of
                          the fit
  --out DIR               folder for page, tables, figures and paper
""",
    "recommend": """\
usage: batchscape recommend DIR [DIR ...] [--devices N] [--memory-gib GIB] [--deadline T]
                            [--target LOSS] [--json]
       batchscape recommend DIR [DIR ...] --ramp [--json]
       batchscape recommend key=value [key=value ...] [--devices N] [--runs DIR] [--out DIR]
                            [--json]

Say which geometry to use after one or more sweeps, why, and what a wrong choice would cost. Given
settings instead, before anything ran: the largest micro-batch that fits, all devices, accumulation
for the rest of the global batch, a learning rate for it; each predicted, measured or computed.

Examples:
  batchscape recommend outputs/fixed_global_batch --devices 2 --deadline 2h
  batchscape recommend model=gpt2_124m batch.global_batch_size=640 cluster=h100_80g \\
      cluster.devices_per_node=8 --out configs

After sweeps:
  DIR ...                 folders of sweeps
  --devices N             devices there are; default: as many as measured
  --memory-gib GIB        memory of a device; default: that of the machine measured, where it is
                          known
  --deadline T            longest time to the target, as 30m, 2h or 90s
  --target LOSS           held-out loss to reach; default: the lowest that all global batches
                          reached
  --ramp                  the stages in which the global batch may grow, after a study of its
                          branches
  --json                  print all of it as JSON
""",
    "recommend key=value": """\
usage: batchscape recommend key=value [key=value ...] [--devices N] [--runs DIR] [--out DIR]
                            [--json]

Before a run:
  key=value               a setting, as those of `batchscape run`
  --devices N             devices to use; default: all there are
  --runs DIR (repeated)   predict from the runs of a sweep
  --out DIR               folder for the files that `batchscape configs` writes
  --json                  print all of it as JSON
""",
    "sync": """\
usage: batchscape sync DIR [DIR ...] [--project NAME] [--entity NAME] [--timeout SECONDS]

Upload every ended run that Weights & Biases does not have yet: written offline, run without a
tracker, or gone on with since; and DIR/report, if there is one and a run has begun. A second call
uploads nothing. Exit code: 0; 1 if a run, its name or the report was not uploaded; 2 if none can be
(no key, no network).

Example:
  batchscape sync outputs/fixed_global_batch

  DIR ...                 folders of sweeps
  --project NAME          project of runs that W&B has not seen; default: their own settings
  --entity NAME           user or team of runs that W&B has not seen; default: their own settings
  --timeout SECONDS [600]
                          longest time without news of a run
""",
    "doctor": """\
usage: batchscape doctor [--dir DIR] [--json]

Show what this machine has, what is missing or broken, and how to repair it. Exit code: 0; 1 if
something is missing that the default sweep needs.

Example:
  batchscape doctor --json

  --dir DIR [outputs]     where sweeps go
  --json                  print all of it as JSON
""",
    "check-config": """\
usage: batchscape check-config [FILE ...] [--devices N] [--flag NAME=WORD] [--json]
                               [-- COMMAND ...]

Say whether files that are used together agree on devices, micro-batch, accumulation and global
batch, what really runs, and how to mend what disagrees. FILE is a DeepSpeed JSON, an accelerate
config, TrainingArguments, a config of axolotl, LLaMA-Factory v1, torchtune or LitGPT (.json,
.yaml), or a script with a launch command; files that a command names are read too. Nothing is
guessed: what is missing is named. Exit code: 0, also where it cannot tell; 1 if they disagree; 2 if
one cannot be read.

Example:
  batchscape check-config ds.json -- torchrun --nproc_per_node 8 train.py \\
      --per_device_train_batch_size 2 --deepspeed ds.json

  [FILE ...]              files that are used together
  --devices N             processes in all, where nothing tells, or only running would
  --flag NAME=WORD (repeated)
                          an argument of your own script, and what it stands for: micro_batch_size,
                          gradient_accumulation_steps or global_batch_size (samples); for one in
                          tokens global_batch_tokens and sequence_length
  --json                  print all of it as JSON
""",
    "configs": """\
usage: batchscape configs --out DIR [--devices N] [--nodes N] [--micro N] [--accumulation N]
                          [--global N] [option ...]

Write a DeepSpeed JSON, accelerate configs, TrainingArguments, a LitGPT config and a torchrun
command that all say the same geometry. Any values that determine the rest are enough.

Example:
  batchscape configs --devices 8 --micro 2 --global 64 --out configs

  --devices N             data-parallel ranks in all
  --nodes N               machines; default: 1
  --micro N               samples per rank and micro-step
  --accumulation N        micro-steps per optimizer step
  --global N              samples per optimizer step
  --precision float32|bfloat16 [float32]
  --clip NORM [1.0]       norm of the gradient to clip to; 0: not clipped
  --zero 0|1|2|3 [1]      ZeRO stage
  --out DIR (needed)      folder to write to
""",
    "geometry": """\
usage: batchscape geometry --global N [--devices N ...] [--nodes N] [option ...]

List every way to cut a global batch: devices x micro-batch x accumulation.

Example:
  batchscape geometry --global 224 --devices 16

  --global N (needed)     samples in a step
  --devices N ...         numbers of ranks
  --nodes N [1]           machines
  --max-devices N         ranks at most
  --max-micro N           samples per rank and micro-step at most
  --max-accumulation N    micro-steps at most
  --json                  print all of it as JSON
""",
}

VERBS = tuple(verb for verb in _TEXTS if " " not in verb)


def _pair(text: str) -> tuple[str, str]:
    """Read NAME=COLUMN."""
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COLUMN")
    return name, column


def _seconds(text: str) -> float:
    """Read a positive number of seconds."""
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")


_KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("DIR", "FILE", "TABLE"), Path),
    **dict.fromkeys(("N", "0|1", "0|1|2|3"), int),
    **dict.fromkeys(("LOSS", "GIB", "NORM", "SHARE", "SAMPLES"), float),
    "SECONDS": _seconds,
    "NAME=COLUMN": _pair,
    "NAME,NAME": lambda text: [name.strip() for name in text.split(",")],
}
"""How words of a kind are read; all others are texts."""
_MARKS: dict[str, dict[str, Any]] = {
    "": {},
    " ...": {"nargs": "+"},
    " ...]": {"nargs": "*"},
    " (repeated)": {"action": "append", "default": []},
    " (needed)": {"required": True},
}
_DECLARATION = re.compile(
    r"^  (?:(--[\w-]+)(?: ([\w=|,]+))?|\[?([A-Z]+))"
    r"( \.\.\.\]?| \(\w+\)| \[[\w.]+\])?(?:  .*)?$",
    re.MULTILINE,
)


class Parser(argparse.ArgumentParser):
    """Reads what a verb takes; a bad option is a `ConfigError` with the one that may be meant."""

    def __init__(self, verb: str) -> None:
        usage, _, text = _TEXTS[verb].partition("\n\n")
        usage = usage.removeprefix("usage: ")
        super().__init__(f"batchscape {verb}", usage, allow_abbrev=False, add_help=False)
        declared = _DECLARATION.findall(text)
        self.options = [option for option, *_ in declared if option]
        for option, value, words, mark in declared:
            kind = value or words
            read = _KINDS.get(kind, str)
            choices = [*map(read, kind.split("|"))] if "|" in kind else None
            form = {"metavar": kind, "type": read, "choices": choices}
            form |= _MARKS[mark] if mark in _MARKS else {"default": read(mark[2:-1])}
            self.add_argument(
                option or words.lower(), **(form if kind else {"action": "store_true"})
            )

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        hint = suggest(unknown.partition("=")[0], [*self.options, "--help"]) if unknown else ""
        raise ConfigError(f"{self.format_usage()}{self.prog}: {message}{hint}")


def help_of(verb: str) -> str:
    """Return the help of a verb; one whose usage is settings alone explains them too."""
    text = _TEXTS[verb]
    if verb == "recommend":
        text += "\n" + _TEXTS["recommend key=value"].partition("\n\n")[2]
    return text + (_SETTINGS if "[key=value ...]\n\n" in text else "")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether help is asked for, other than by words of a command behind `--`."""
    end = arguments.index("--") if "--" in arguments else None
    return bool({"--help", "-h"} & set(arguments[:end]))
