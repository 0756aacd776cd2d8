"""The command line: verbs that parse and delegate."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from batchscape import __version__
from batchscape.errors import BatchscapeError, ConfigError, LaunchError
from batchscape.launch.interrupts import terminations_as_interrupts
from batchscape.libraries import why_missing
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.record.commands import command_of
from batchscape.text import parse_duration, suggest

if TYPE_CHECKING:
    from rich.console import Console

    from batchscape.plan.build import Plan
    from batchscape.plan.expand import SweepCells
    from batchscape.plan.machine import Machine

_HELP = """\
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

_SETTINGS_HELP = """
Settings:
  key=value               one setting, such as optimizer.learning_rate=0.003
  group=option            one of batch, model, data, optimizer, schedule, scaling, budget,
                          evaluation, engine, device, cluster, loader, checkpoint, measure,
                          search, launcher, tracker
  --config-dir DIR        a folder with options and sweeps of your own
  --cfg job               show the settings instead, each with what it means and takes
"""

_VERB_HELP = {
    "sweep": """\
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
Run one combination of settings.

Example:
  batchscape run batch.micro_batch_size=8 model=gpt_micro
""",
    "plan": """\
Show the runs that `batchscape sweep` would launch with the same arguments, the rejected runs with
their reasons, and what runs and sweep will take: step time, device-hours, end. Launches
nothing and writes nothing but the cache of prepared data.

Examples:
  batchscape plan sweeps=musev_224
  batchscape plan sweeps=musev_224 cluster=h100_80g cluster.nodes=2 batch.nodes=2

  --json                  print all of it as JSON
  --runs DIR              predict from the runs of a sweep, beside those of the plan's own folder
  cluster=NAME            a machine that is declared in conf/cluster/; this one by default
""",
    "probe": """\
Find the largest micro-batch that fits, with the global batch and the devices held: a few trainings
of three optimizer steps, begun where the predicted memory says. They are runs of outputs/probe, so
the same command knows them. On a CPU give the limit of memory that the answer is for.

Example:
  batchscape probe batch.global_batch_size=256 device.memory_limit_gib=0.5

  --json                  print all of it as JSON
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Without the program's name; None takes those of the process.

    Returns
    -------
    int
        0; 1 if a run failed, ran out of memory or time, or was stopped by others; 2 for bad input
        or a folder that cannot be used; 130 if interrupted.
    """
    if argv is None:
        # At exit the system frees all memory at once: the interpreter need not collect garbage.
        atexit.register(gc.freeze)
        # Objects of a plan or a report live to its end, so that frequent collections find nothing.
        gc.set_threshold(1_000_000, 20, 100)
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except BatchscapeError as error:
        sys.stderr.write(f"{outgoing(str(error))}\n")
        return 2
    except BrokenPipeError:
        raise
    except (AttributeError, ImportError) as error:
        if (problem := why_missing(error)) is None:
            raise
        sys.stderr.write(f"{problem}\n")
        return 2
    except OSError as error:
        # An error of the system, such as a full disk or a folder that cannot be written to.
        sys.stderr.write(f"{outgoing(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("Stopped\n")
        return 130


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in {"--help", "-h"}:
        sys.stdout.write(_HELP)
        return 0
    if first == "--version":
        sys.stdout.write(f"batchscape {__version__}\n")
        return 0
    if first in _VERBS:
        if first in _VERB_HELP and {"--help", "-h"} & set(argv):
            usage = f"usage: batchscape {first} [key=value ...]\n\n"
            sys.stdout.write(usage + _VERB_HELP[first] + _SETTINGS_HELP)
            return 0
        with terminations_as_interrupts():
            return _VERBS[first](argv[1:])
    if "=" in first or first.startswith(("-", "~")):
        # Hydra's own way to call an application.
        with terminations_as_interrupts():
            return _sweep(argv) if {"--multirun", "-m"} & set(argv) else _run(argv)
    raise ConfigError(f"unknown verb {first!r}{suggest(first, _VERBS)}; batchscape --help")


def _sweep(arguments: list[str]) -> int:
    grid = _compose(arguments, "sweep")
    return 0 if grid is None else _launch(grid, arguments)


def _run(arguments: list[str]) -> int:
    grid = _compose(arguments, "run")
    if grid is None:
        return 0
    has_many_runs = grid.sweep_file is not None or len(grid.cells) > 1 or grid.intervals
    if has_many_runs or _is_search(grid) or {"--multirun", "-m"} & set(arguments):
        words = [argument for argument in arguments if argument not in {"--multirun", "-m"}]
        what = "search" if grid.intervals else f"sweep of {len(grid.cells)}"
        raise ConfigError(
            f"`run` is for one run, and this asks for a {what}; "
            f"use: {shlex.join(['batchscape', 'sweep', *words])}"
        )
    return _launch(grid, arguments)


def _plan(arguments: list[str]) -> int:
    parser = _Parser("plan", add_help=False)
    parser.add_json()
    parser.add_argument("--runs", metavar="DIR", type=Path, action="append", default=[])
    parsed, settings = parser.parse_known_args(arguments)
    grid = _compose(settings, "plan")
    if grid is None:
        return 0
    from batchscape.plan.table import plan_json, plan_table
    from batchscape.predictor import predict
    from batchscape.record.folder import SweepFolder

    machine = _machine(grid)
    stand_in = None
    if _is_search(grid):
        from batchscape.data.corpus import prepare
        from batchscape.search.stand_ins import stand_ins

        stand_in = stand_ins(grid, machine, prepare)
    plan = _make_plan(grid if stand_in is None else stand_in.cells, machine)
    predicted = predict(plan.specs, SweepFolder(plan.sweep_dir), machine, parsed.runs)
    if parsed.json:
        sys.stdout.write(plan_json(plan, machine, predicted) + "\n")
    elif stand_in is None:
        _console().print(plan_table(plan, predicted))
    else:
        _console().print(stand_in.text)
        _console().print(plan_table(plan, predicted, lists_runs=False))
    return 0


def _geometry(arguments: list[str]) -> int:
    parser = _Parser(
        "geometry",
        description="List every way to cut a global batch: devices x micro-batch x accumulation.",
        example="batchscape geometry --global 224 --devices 16",
    )
    parser.add_argument(
        "--global", metavar="B", type=int, dest="total", required=True, help="samples in a step"
    )
    parser.add_argument("--devices", metavar="D", type=int, nargs="+", help="numbers of ranks")
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="machines; default: 1")
    parser.add_argument("--max-devices", metavar="MOST", type=int, help="ranks at most")
    parser.add_argument(
        "--max-micro", metavar="MOST", type=int, help="samples per rank and micro-step at most"
    )
    parser.add_argument("--max-accumulation", metavar="MOST", type=int, help="micro-steps at most")
    parser.add_json()
    parsed = parser.parse_args(arguments)
    from batchscape.geometry import enumerate_geometries
    from batchscape.record.spec import plain_geometry

    geometries = enumerate_geometries(
        parsed.total,
        nodes=parsed.nodes,
        data_parallel_sizes=parsed.devices,
        max_data_parallel_size=parsed.max_devices,
        max_micro_batch_size=parsed.max_micro,
        max_gradient_accumulation_steps=parsed.max_accumulation,
    )
    if not geometries:
        ways = enumerate_geometries(parsed.total)
        counts = ", ".join(
            map(str, dict.fromkeys(geometry.data_parallel_size for geometry in ways))
        )
        raise ConfigError(
            "devices x micro-batch x accumulation must be the global batch, and devices a multiple "
            f"of the nodes; given {shlex.join(arguments)}; a global batch of {parsed.total} can "
            f"take {counts} devices; or raise a limit"
        )
    if parsed.json:
        rows = [plain_geometry(geometry) for geometry in geometries]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{geometry}\n" for geometry in geometries)
    return 0


def _probe(arguments: list[str]) -> int:
    as_text = "--json" not in arguments
    grid = _compose([argument for argument in arguments if argument != "--json"], "probe")
    if grid is None:
        return 0
    from batchscape.probe import probe, show_answer

    console = _console() if as_text else _console(stderr=True)
    answer = probe(grid, _machine_here(grid), console)
    if as_text:
        show_answer(console, answer)
    else:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def _report(arguments: list[str]) -> int:
    parser = _Parser(
        "report",
        description="Write a page, tables and figures of sweeps, and print what they say.",
        example="batchscape report outputs/fixed_global_batch",
    )
    parser.add_folders()
    parser.add_argument(
        "--out", type=Path, help="where to write; default: DIR/report; needed for several DIRs"
    )
    parser.add_argument(
        "--target",
        metavar="LOSS",
        type=float,
        nargs="+",
        help="held-out losses to reach; default: chosen from what every global batch reached",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME,NAME",
        type=lambda text: [name.strip() for name in text.split(",")],
        help="figures of the comparison, in this order, as in step_time_s,final_loss; "
        "default: all that were recorded",
    )
    parsed = parser.parse_args(arguments)
    if parsed.out is None and len(parsed.folders) > 1:
        raise ConfigError(
            "a report of several sweeps belongs to none of them: say where with --out DIR"
        )
    from batchscape.analysis.report.write import write_report
    from batchscape.record.folder import SweepFolder

    out = parsed.out or SweepFolder(parsed.folders[0]).report
    write_report(parsed.folders, out, targets=parsed.target, columns=parsed.columns).render(
        _console()
    )
    return 0


def _view(arguments: list[str]) -> int:
    parser = _Parser(
        "view",
        description="Serve the page of sweeps to a browser on this machine, and make it anew as "
        "runs end. Nothing is written into their folders. Ctrl-C ends it, with code 0.",
        example="batchscape view outputs/fixed_global_batch",
    )
    parser.add_folders()
    parser.add_argument("--port", metavar="N", type=int, default=0, help="default: a free one")
    parsed = parser.parse_args(arguments)
    from batchscape.analysis.page.view import view

    view(parsed.folders, parsed.port, _console())
    return 0


def _recommend(arguments: list[str]) -> int:
    is_setting = [
        "=" in word and not word.startswith("-") and not Path(word).exists() for word in arguments
    ]
    if any(is_setting) and not {"--help", "-h"} & set(arguments):
        return _follow_recipe(arguments)
    parser = _Parser(
        "recommend",
        usage="batchscape recommend DIR [DIR ...] [--devices N] [--memory-gib M] [--deadline T] "
        "[--target LOSS] [--json]\n       batchscape recommend DIR [DIR ...] --ramp [--json]\n"
        "       batchscape recommend key=value [key=value ...] "
        "[--devices N] [--runs DIR] [--out DIR] [--json]",
        description="Say which geometry to use after one or more sweeps, why, and what a wrong "
        "choice would cost. Given settings instead, before anything ran: the largest micro-batch "
        "that fits, all devices, accumulation for the rest of the global batch, a learning rate "
        "for it; each predicted, measured or computed.",
        example="batchscape recommend outputs/fixed_global_batch --devices 2 --deadline "
        "2h; batchscape recommend model=gpt2_124m batch.global_batch_size=640 cluster=h100_80g "
        "cluster.devices_per_node=8 --out configs",
    )
    parser.add_folders()
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="devices there are; default: as many as measured",
    )
    parser.add_argument(
        "--memory-gib",
        metavar="M",
        type=float,
        help="memory of a device; default: that of the machine measured, where it is known",
    )
    parser.add_argument(
        "--deadline", metavar="T", help="longest time to the target, as 30m, 2h or 90s"
    )
    parser.add_argument(
        "--target",
        metavar="LOSS",
        type=float,
        help="held-out loss to reach; default: the lowest that all global batches reached",
    )
    parser.add_argument(
        "--ramp",
        action="store_true",
        help="the stages in which the global batch may grow, after a study of its branches",
    )
    parser.add_json()
    parsed = parser.parse_args(arguments)
    if parsed.ramp:
        if len(arguments) > len(parsed.folders) + 1 + parsed.json:
            raise ConfigError(
                "--ramp follows the critical batch, and takes no other option but --json"
            )
        return _recommend_ramp(parsed.folders, is_json=parsed.json)
    from batchscape.analysis.decisions.evidence import gather
    from batchscape.analysis.decisions.recommend import Needs, recommend
    from batchscape.analysis.decisions.show import as_json, show_recommendation

    deadline_s = None if parsed.deadline is None else parse_duration(parsed.deadline)
    needs = Needs(parsed.devices, parsed.memory_gib, deadline_s)
    recommendations = [
        recommend(evidence, needs) for evidence in gather(parsed.folders, parsed.target)
    ]
    if parsed.json:
        sys.stdout.write(as_json(recommendations) + "\n")
        return 0
    for recommendation in recommendations:
        show_recommendation(_console(), recommendation)
    return 0


def _recommend_ramp(folders: list[Path], *, is_json: bool) -> int:
    from batchscape.analysis.branches.ramps import find_ramp
    from batchscape.analysis.cells import find_cells
    from batchscape.record.tables import load

    tables = load(*folders)
    ramp = find_ramp(find_cells(tables.runs), tables.steps)
    if is_json:
        sys.stdout.write(json.dumps(outgoing_json(asdict(ramp)), indent=2) + "\n")
        return 0
    for line in ramp.lines:
        _console().print(line, soft_wrap=True)
    return 0


def _follow_recipe(arguments: list[str]) -> int:
    """Recommend a geometry for settings of which nothing was measured."""
    parser = _Parser("recommend", add_help=False)
    parser.add_argument("--devices", metavar="N", type=int)
    parser.add_argument("--runs", metavar="DIR", type=Path, action="append", default=[])
    parser.add_argument("--out", metavar="DIR", type=Path)
    parser.add_json()
    parsed, settings = parser.parse_known_args(arguments)
    run_options = [word for word in settings if word.partition("=")[0] in _RUN_OPTIONS]
    if run_options:
        raise ConfigError(
            f"{run_options[0]} needs sweeps that ran, and settings ask for a recipe before any "
            f"run: give folders in place of settings, or leave {run_options[0]} out (the memory of "
            "a device is the setting device.memory_limit_gib)"
        )
    grid = _compose(settings, "recommend")
    if grid is None:
        return 0
    from batchscape.recipe import follow_recipe, show_recipe, write_files

    machine = _machine(grid)
    recipe = follow_recipe(grid, machine, settings, devices=parsed.devices, runs=parsed.runs)
    written = [] if parsed.out is None else write_files(recipe, parsed.out)
    if parsed.json:
        sys.stdout.write(json.dumps(recipe.content, indent=2) + "\n")
    else:
        show_recipe(_console(), recipe)
    for path in written:
        _console(stderr=parsed.json).print(f"  {path}", soft_wrap=True)
    return 0 if recipe.chosen is not None else 1


_RUN_OPTIONS = ("--deadline", "--memory-gib", "--target")


def _analyze(arguments: list[str]) -> int:
    parser = _Parser(
        "analyze",
        description="Fit how optimizer steps trade against the global batch in a table of your "
        "own: loss curves, or steps to a target loss, one row a measurement or run; or seek the "
        "learning rates of the lowest final losses. Columns: docs/analysis_tables.md.",
        example="batchscape analyze steps.csv --group model --reference-batch 256",
    )
    parser.add_argument("table", metavar="TABLE", type=Path, help=".csv, .tsv, .parquet or .jsonl")
    parser.add_argument(
        "--target",
        metavar="LOSS",
        type=float,
        nargs="+",
        help="losses to reach; default: chosen from curves, or all that the table has",
    )
    parser.add_argument(
        "--group",
        metavar="COLUMN",
        nargs="+",
        default=[],
        help="columns that runs must agree in; a column `group` is always one",
    )
    parser.add_argument(
        "--column",
        metavar="NAME=COLUMN",
        type=_pair,
        action="append",
        default=[],
        help="which column of the table is NAME, where that cannot be told",
    )
    parser.add_argument(
        "--minimise",
        choices=("loss", "steps"),
        help="final losses, or steps to a target; default: loss where every run has one loss",
    )
    parser.add_argument(
        "--nan",
        choices=("missing", "diverged"),
        help="what a loss of NaN is; default: text and JSON say, and what does not is asked about",
    )
    parser.add_argument(
        "--first-step",
        choices=(0, 1),
        type=int,
        help="number of the first optimizer step in the table; default: 1, asked about where runs "
        "may show 0",
    )
    parser.add_argument(
        "--crossing",
        choices=("sustained", "first", "first_evaluation"),
        default="sustained",
        help="when a curve reaches a target: for good, at first, or at the first evaluation as "
        "measured, which is AlgoPerf's rule; default: sustained",
    )
    parser.add_argument(
        "--form",
        choices=("two_term", "free_exponent"),
        help="form of the trade-off that the answer rests on; default: the one that is trusted, "
        "with a free exponent from four batch sizes on",
    )
    parser.add_argument(
        "--overhead",
        metavar="SHARE",
        type=float,
        default=0.2,
        help="samples above those at the reference batch that are accepted; default: 0.2",
    )
    parser.add_argument(
        "--reference-batch",
        metavar="SAMPLES",
        type=float,
        help="the batch that the overhead is counted from; default: the smallest of the fit",
    )
    parser.add_argument("--out", type=Path, help="folder for page, tables, figures and paper")
    parsed = parser.parse_args(arguments)
    from batchscape.analysis.report.analyze import analyze
    from batchscape.analysis.targets.foreign import ReadOptions

    analysis = analyze(
        parsed.table,
        ReadOptions(
            group=parsed.group,
            columns=dict(parsed.column),
            minimise=parsed.minimise,
            nan=parsed.nan,
            first_step=parsed.first_step,
        ),
        targets=parsed.target,
        form=parsed.form,
        overhead=parsed.overhead,
        reference_batch_size=parsed.reference_batch,
        crossing=parsed.crossing,
    )
    analysis.render(_console())
    if parsed.out is None:
        _console().print("\nFigures and files: add --out DIR")
    else:
        _console().print(f"\nPage: {analysis.write(parsed.out)[0]}", soft_wrap=True)
    return 0


def _status(arguments: list[str]) -> int:
    parser = _Parser(
        "status",
        description="Show what a sweep has done, what runs now, what failed and why, and what the "
        "same command would do next; also while it runs. docs/statuses.md explains the words.",
        example="batchscape status outputs/fixed_global_batch",
    )
    parser.add_folder()
    parser.add_json()
    parsed = parser.parse_args(arguments)
    from batchscape.record.folder import SweepFolder
    from batchscape.record.overview import overview, overview_text

    sweep = SweepFolder(parsed.folder)
    # A search that has no grid yet has only trials, which are shown in its place.
    has_trials_only = sweep.search.runs.exists() and not sweep.runs.exists()
    state = overview(sweep.search if has_trials_only else sweep)
    if parsed.json:
        sys.stdout.write(state.as_json() + "\n")
        return 0
    _console().print(overview_text(state))
    if sweep.slurm.is_dir():
        from batchscape.launch.slurm.launch import describe_jobs

        # Only on the cluster can the scheduler be asked for jobs.
        with suppress(LaunchError):
            _console().print(describe_jobs(sweep))
    return 0


def _cancel(arguments: list[str]) -> int:
    parser = _Parser(
        "cancel",
        description="End the jobs of a sweep that launcher=slurm has submitted. Runs at work are "
        "asked for a checkpoint; the same command goes on with them later.",
        example="batchscape cancel outputs/fixed_global_batch",
    )
    parser.add_folder()
    parsed = parser.parse_args(arguments)
    from batchscape.launch.slurm.launch import cancel
    from batchscape.record.folder import SweepFolder

    sweep = SweepFolder(parsed.folder)
    if not sweep.slurm.is_dir():
        raise ConfigError(
            f"{parsed.folder} has no jobs: nothing was launched there with launcher=slurm"
        )
    count = cancel(sweep)
    _console().print(f"Jobs cancelled: {count}")
    return 0


def _sync(arguments: list[str]) -> int:
    parser = _Parser(
        "sync",
        description="Upload every ended run that Weights & Biases does not have yet: written "
        "offline, run without a tracker, or gone on with since; and DIR/report, if there is one "
        "and a run has begun. A second call uploads nothing. Exit code: 0; 1 if a run, its name or "
        "the report was not uploaded; 2 if none can be (no key, no network).",
        example="batchscape sync outputs/fixed_global_batch",
    )
    parser.add_folders()
    new = "of runs that W&B has not seen; default: their own settings"
    parser.add_argument("--project", help=f"project {new}")
    parser.add_argument("--entity", help=f"user or team {new}")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=600.0,
        help="longest time without news of a run; default: 600",
    )
    parsed = parser.parse_args(arguments)
    from batchscape.tracking.sync import sync

    is_complete = sync(
        parsed.folders,
        _console(),
        project=parsed.project,
        entity=parsed.entity,
        timeout_s=parsed.timeout,
    )
    return 0 if is_complete else 1


def _doctor(arguments: list[str]) -> int:
    parser = _Parser(
        "doctor",
        description="Show what this machine has, what is missing or broken, and how to repair it. "
        "Exit code: 0; 1 if something is missing that the default sweep needs.",
        example="batchscape doctor --json",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("outputs"), help="where sweeps go; default: outputs"
    )
    parser.add_json()
    parsed = parser.parse_args(arguments)
    from batchscape.doctor import as_json, as_table, examine, is_fit

    findings = examine(parsed.dir)
    if parsed.json:
        sys.stdout.write(as_json(findings) + "\n")
    else:
        _console().print(as_table(findings))
    return 0 if is_fit(findings) else 1


_FLAG = "--flag"


def _check_config(arguments: list[str]) -> int:
    parser = _Parser(
        "check-config",
        usage="batchscape check-config [FILE ...] [--devices N] [--flag NAME=WORD] [--json] "
        "[-- COMMAND ...]",
        description="Say whether files that are used together agree on devices, micro-batch, "
        "accumulation and global batch, what really runs, and how to mend what disagrees. FILE is "
        "a DeepSpeed JSON, an accelerate config, TrainingArguments, a config of axolotl, "
        "LLaMA-Factory v1, torchtune or LitGPT (.json, .yaml), or a script with a launch command; "
        "files that a command names are read too. Nothing is guessed: what is missing is named. "
        "Exit code: 0, also where it cannot tell; 1 if they disagree; 2 if one cannot be read.",
        example="batchscape check-config ds.json -- torchrun --nproc_per_node 8 train.py "
        "--per_device_train_batch_size 2 --deepspeed ds.json",
    )
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path)
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="processes in all, where nothing tells, or only running would",
    )
    parser.add_argument(
        _FLAG,
        metavar="NAME=WORD",
        action="append",
        default=[],
        help="an argument of your own script, and what it stands for: micro_batch_size, "
        "gradient_accumulation_steps or global_batch_size (samples); for one in tokens "
        "global_batch_tokens and sequence_length; once for each",
    )
    parser.add_json()
    # The words behind -- are the launch command, whose options are not ours.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    # The parser would take `--NAME=WORD` behind --flag for one of our options.
    words: list[str] = []
    for argument in arguments[:end]:
        if words and words[-1] == _FLAG:
            words[-1] += f"={argument}"
        else:
            words.append(argument)
    parsed = parser.parse_args(words)
    from batchscape.interop.check import check_configs

    consistency = check_configs(
        parsed.files, arguments[end + 1 :], devices=parsed.devices, flags=parsed.flag
    )
    if parsed.json:
        sys.stdout.write(consistency.as_json() + "\n")
    else:
        _console().print(consistency.as_table(), soft_wrap=True)
    return 0 if consistency.is_consistent else 1


def _configs(arguments: list[str]) -> int:
    parser = _Parser(
        "configs",
        description="Write a DeepSpeed JSON, accelerate configs, TrainingArguments, a LitGPT "
        "config and a torchrun command that all say the same geometry. Any values that determine "
        "the rest are enough.",
        example="batchscape configs --devices 8 --micro 2 --global 64 --out configs",
    )
    parser.add_argument("--devices", metavar="D", type=int, help="data-parallel ranks in all")
    parser.add_argument("--nodes", metavar="N", type=int, help="machines; default: 1")
    parser.add_argument("--micro", metavar="M", type=int, help="samples per rank and micro-step")
    parser.add_argument(
        "--accumulation", metavar="A", type=int, help="micro-steps per optimizer step"
    )
    parser.add_argument(
        "--global", metavar="B", type=int, dest="total", help="samples per optimizer step"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--clip", metavar="NORM", type=float, default=1.0, help="default: 1.0; 0: not clipped"
    )
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="ZeRO stage")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write to")
    parsed = parser.parse_args(arguments)
    from batchscape.geometry import solve
    from batchscape.interop.write import write_configs

    geometry = solve(
        nodes=parsed.nodes,
        data_parallel_size=parsed.devices,
        micro_batch_size=parsed.micro,
        gradient_accumulation_steps=parsed.accumulation,
        global_batch_size=parsed.total,
    )
    written = write_configs(
        geometry,
        parsed.out,
        precision=parsed.precision,
        gradient_clip_norm=parsed.clip or None,
        zero_stage=parsed.zero,
    )
    _console().print(f"devices x micro-batch x accumulation = {geometry}")
    for path in written:
        _console().print(f"  {path}", soft_wrap=True)
    return 0


class _Parser(argparse.ArgumentParser):
    """Refuses bad options by a `ConfigError`, with the option that may be meant."""

    def __init__(self, verb: str, *, example: str = "", **options: Any) -> None:  # noqa: ANN401
        epilog = f"Example: {example}"
        self._options: list[str] = []
        super().__init__(f"batchscape {verb}", allow_abbrev=False, epilog=epilog, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:  # noqa: ANN401
        action = super().add_argument(*names, **options)
        self._options += [name for name in action.option_strings if name.startswith("--")]
        return action

    def add_folder(self) -> None:
        self.add_argument("folder", metavar="DIR", type=Path, help="folder of a sweep")

    def add_folders(self) -> None:
        self.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="folder of a sweep")

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print all of it as JSON")

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        option = unknown.partition("=")[0]
        hint = suggest(option, self._options) if unknown else ""
        raise ConfigError(f"{self.format_usage()}{self.prog}: {message}{hint}")


def _pair(text: str) -> tuple[str, str]:
    """Read NAME=COLUMN; argparse turns the ValueError into its own message."""
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise ValueError
    return name, column


def _seconds(text: str) -> float:
    """Read a positive number; argparse turns the ValueError into its own message."""
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "sweep": _sweep,
    "run": _run,
    "plan": _plan,
    "probe": _probe,
    "status": _status,
    "cancel": _cancel,
    "report": _report,
    "view": _view,
    "analyze": _analyze,
    "recommend": _recommend,
    "sync": _sync,
    "doctor": _doctor,
    "check-config": _check_config,
    "configs": _configs,
    "geometry": _geometry,
}


def _compose(arguments: list[str], verb: str) -> SweepCells | None:
    from batchscape.compose import compose

    return compose(arguments, f"batchscape {verb}")


def _machine(grid: SweepCells) -> Machine:
    from batchscape.config import Cluster, RunConfig
    from batchscape.plan.machine import Machine

    try:
        config = RunConfig.from_mapping(grid.cells[0].settings)
    except ConfigError:
        # The plan will refuse it, with the problems of all cells.
        return Machine.of(Cluster())
    return Machine.of(config.cluster, config.launcher)


def _machine_here(grid: SweepCells) -> Machine:
    """Return this machine; one that is declared is planned for only."""
    machine = _machine(grid)
    if _is_on_slurm(grid):
        raise ConfigError(
            "only sweep and run work with launcher=slurm; in a job of your own, give the same "
            "command with launcher=local and without cluster: it takes the devices of the job"
        )
    if machine.is_declared:
        raise ConfigError(
            f"cluster declares {machine.cluster.device}, which can be planned for, not launched "
            "on: use `batchscape plan` with the same arguments, or cluster=this_machine on such a "
            "machine itself"
        )
    return machine


def _make_plan(grid: SweepCells, machine: Machine) -> Plan:
    from batchscape.data.corpus import prepare
    from batchscape.plan.build import make_plan

    return make_plan(grid, machine, prepare)


def _launch(grid: SweepCells, arguments: Sequence[str]) -> int:
    from batchscape.launch.launcher import Launcher
    from batchscape.plan.table import plan_summary, write_plan
    from batchscape.record.folder import SweepFolder

    is_on_slurm = _is_on_slurm(grid)
    if _is_search(grid):
        return _search(grid, _machine_here(grid), arguments)
    machine = _machine(grid) if is_on_slurm else _machine_here(grid)
    plan = _make_plan(grid, machine)
    _console().print(plan_summary(plan))
    try:
        write_plan(plan)
    except OSError as error:
        raise LaunchError(
            f"{plan.sweep_dir} cannot be used ({error}); give a sweep_dir that can be written to"
        ) from None
    sweep, command = SweepFolder(plan.sweep_dir), command_of(arguments)
    if is_on_slurm:
        from batchscape.launch.slurm.launch import run_on_slurm

        result = run_on_slurm(plan.specs, sweep, console=_console(), command=command)
    else:
        result = Launcher(sweep, machine, plan.specs, command=command).run()
    report = shlex.join(["batchscape", "report", str(plan.sweep_dir)])
    _console().print(f"Runs: {plan.sweep_dir}\nReport: {report}", soft_wrap=True)
    if (untimed := result.untimed_text(sweep, command)) is not None:
        _console().print(untimed, style="yellow", soft_wrap=True)
    if result.interrupted:
        return 130
    return 1 if result.failed or result.why_stopped else 0


def _is_on_slurm(grid: SweepCells) -> bool:
    return bool(grid.cells[0].settings["launcher"]["name"] == "slurm")


def _is_search(grid: SweepCells) -> bool:
    return bool(grid.cells[0].settings["search"]["name"] != "none")


def _search(grid: SweepCells, machine: Machine, arguments: Sequence[str]) -> int:
    from batchscape.data.corpus import prepare
    from batchscape.search import search

    console = _console()
    outcome = search(grid, machine, prepare, console, command_of(arguments))
    console.print(f"Trials: {outcome.sweep_dir / 'search'}", soft_wrap=True)
    from batchscape.analysis.search.topic import print_search_result
    from batchscape.record.folder import SweepFolder

    print_search_result(SweepFolder(outcome.sweep_dir), console)
    if (outcome.sweep_dir / "runs").exists():
        report = shlex.join(["batchscape", "report", str(outcome.sweep_dir)])
        console.print(f"Report: {report}", soft_wrap=True)
    if outcome.result.interrupted:
        return 130
    return (
        1 if outcome.result.failed or outcome.result.why_stopped or not outcome.is_complete else 0
    )


def _console(*, stderr: bool = False) -> Console:
    from batchscape.terminal import OutgoingConsole

    # Without a terminal there is no width to wrap at.
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _PIPE_WIDTH
    return OutgoingConsole(width=width, highlight=False, markup=False, stderr=stderr)


_PIPE_WIDTH = 160
