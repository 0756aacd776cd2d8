"""The command line: verbs that parse and delegate."""

from __future__ import annotations

import atexit
import gc
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from batchscape import __version__
from batchscape.errors import BatchscapeError, ConfigError, LaunchError
from batchscape.launch.interrupts import terminations_as_interrupts
from batchscape.libraries import why_missing
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.record.commands import command_of
from batchscape.text import list_text, parse_duration, suggest
from batchscape.verbs import HELP, VERBS, Parser, asks_for_help, help_of

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

    from batchscape.launch.result import SweepResult
    from batchscape.plan.build import Plan
    from batchscape.plan.expand import SweepCells
    from batchscape.plan.machine import Machine


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
    except BrokenPipeError:
        raise
    except (BatchscapeError, OSError) as error:
        # An error of the system is such as a full disk or a folder that cannot be written to.
        sys.stderr.write(f"{outgoing(str(error))}\n")
        return 2
    except (AttributeError, ImportError) as error:
        if (problem := why_missing(error)) is None:
            raise
        sys.stderr.write(f"{problem}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("Stopped\n")
        return 130


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in {"--help", "-h"}:
        return _say(HELP)
    if first == "--version":
        return _say(f"batchscape {__version__}\n")
    if first in VERBS and asks_for_help(argv):
        return _say(help_of(first))
    with terminations_as_interrupts():
        if first in _PARSED_VERBS:
            return _PARSED_VERBS[first](Parser(first).parse_args(argv[1:]))
        if first in _VERBS:
            return _VERBS[first](argv[1:])
        if "=" in first or first.startswith(("-", "~")):
            # Hydra's own way to call an application.
            return _sweep(argv) if _MULTIRUN & set(argv) else _run(argv)
    raise ConfigError(f"unknown verb {first!r}{suggest(first, VERBS)}; batchscape --help")


def _say(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _say_json(content: object) -> int:
    return _say(json.dumps(content, indent=2) + "\n")


def _sweep(arguments: list[str]) -> int:
    grid = _compose(arguments, "sweep")
    return 0 if grid is None else _launch(grid, arguments)


def _run(arguments: list[str]) -> int:
    grid = _compose(arguments, "run")
    if grid is None:
        return 0
    has_many_runs = grid.sweep_file is not None or len(grid.cells) > 1 or grid.intervals
    if has_many_runs or _is_search(grid) or _MULTIRUN & set(arguments):
        words = [argument for argument in arguments if argument not in _MULTIRUN]
        what = "search" if grid.intervals else f"sweep of {len(grid.cells)}"
        raise ConfigError(
            f"`run` is for one run, and this asks for a {what}; "
            f"use: {shlex.join(['batchscape', 'sweep', *words])}"
        )
    return _launch(grid, arguments)


def _plan(arguments: list[str]) -> int:
    parser = Parser("plan")
    parsed, settings = parser.parse_known_args(arguments)
    grid = _compose(settings, "plan", parser.options)
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
        return _say(plan_json(plan, machine, predicted) + "\n")
    if stand_in is not None:
        _console().print(stand_in.text)
    _console().print(plan_table(plan, predicted, lists_runs=stand_in is None))
    return 0


def _geometry(arguments: list[str]) -> int:
    options = vars(Parser("geometry").parse_args(arguments))
    from batchscape.geometry import enumerate_geometries
    from batchscape.record.spec import plain_geometry

    geometries = enumerate_geometries(
        options["global"],
        nodes=options["nodes"],
        data_parallel_sizes=options["devices"],
        max_data_parallel_size=options["max_devices"],
        max_micro_batch_size=options["max_micro"],
        max_gradient_accumulation_steps=options["max_accumulation"],
    )
    if not geometries:
        ways = enumerate_geometries(options["global"])
        counts = list_text(dict.fromkeys(geometry.data_parallel_size for geometry in ways), "")
        raise ConfigError(
            "devices x micro-batch x accumulation must be the global batch, and devices a multiple "
            f"of the nodes; given {shlex.join(arguments)}; a global batch of {options['global']} "
            f"can take {counts} devices; or raise a limit"
        )
    if options["json"]:
        return _say_json([plain_geometry(geometry) for geometry in geometries])
    return _say("".join(f"{geometry}\n" for geometry in geometries))


def _probe(arguments: list[str]) -> int:
    parser = Parser("probe")
    parsed, settings = parser.parse_known_args(arguments)
    grid = _compose(settings, "probe", parser.options)
    if grid is None:
        return 0
    from batchscape.probe import probe, show_answer

    console = _console(stderr=parsed.json)
    answer = probe(grid, _machine_here(grid), console)
    if parsed.json:
        return _say_json(answer)
    show_answer(console, answer)
    return 0


def _report(parsed: Namespace) -> int:
    if parsed.out is None and len(parsed.dir) > 1:
        raise ConfigError(
            "a report of several sweeps belongs to none of them: say where with --out DIR"
        )
    from batchscape.analysis.report.write import write_report
    from batchscape.record.folder import SweepFolder

    out = parsed.out or SweepFolder(parsed.dir[0]).report
    report = write_report(parsed.dir, out, targets=parsed.target, columns=parsed.columns)
    report.render(_console())
    return 0


def _view(parsed: Namespace) -> int:
    from batchscape.analysis.page.view import view

    view(parsed.dir, parsed.port, _console())
    return 0


def _recommend(arguments: list[str]) -> int:
    if any("=" in word and word[0] != "-" and not Path(word).exists() for word in arguments):
        return _follow_recipe(arguments)
    parsed = Parser("recommend").parse_args(arguments)
    if parsed.ramp:
        if len(arguments) > len(parsed.dir) + 1 + parsed.json:
            raise ConfigError(
                "--ramp follows the critical batch, and takes no other option but --json"
            )
        from batchscape.analysis.branches.ramps import find_ramp
        from batchscape.analysis.cells import find_cells
        from batchscape.record.tables import load

        tables = load(*parsed.dir)
        ramp = find_ramp(find_cells(tables.runs), tables.steps)
        if parsed.json:
            return _say_json(outgoing_json(asdict(ramp)))
        for line in ramp.lines:
            _console().print(line, soft_wrap=True)
        return 0
    from batchscape.analysis.decisions.evidence import gather
    from batchscape.analysis.decisions.recommend import Needs, recommend
    from batchscape.analysis.decisions.show import as_json, show_recommendation

    deadline_s = None if parsed.deadline is None else parse_duration(parsed.deadline)
    needs = Needs(parsed.devices, parsed.memory_gib, deadline_s)
    recommendations = [recommend(evidence, needs) for evidence in gather(parsed.dir, parsed.target)]
    if parsed.json:
        return _say(as_json(recommendations) + "\n")
    for recommendation in recommendations:
        show_recommendation(_console(), recommendation)
    return 0


def _follow_recipe(arguments: list[str]) -> int:
    """Recommend a geometry for settings of which nothing was measured."""
    parser = Parser("recommend key=value")
    parsed, settings = parser.parse_known_args(arguments)
    after_runs = {"--deadline", "--memory-gib", "--target"}
    if option := next((w for w in settings if w.partition("=")[0] in after_runs), None):
        raise ConfigError(
            f"{option} needs sweeps that ran, and settings ask for a recipe before any run: give "
            f"folders in place of settings, or leave {option} out (the memory of a device is the "
            "setting device.memory_limit_gib)"
        )
    grid = _compose(settings, "recommend", parser.options)
    if grid is None:
        return 0
    from batchscape.recipe import follow_recipe, show_recipe, write_files

    machine = _machine(grid)
    recipe = follow_recipe(grid, machine, settings, devices=parsed.devices, runs=parsed.runs)
    written = [] if parsed.out is None else write_files(recipe, parsed.out)
    if parsed.json:
        _say_json(recipe.content)
    else:
        show_recipe(_console(), recipe)
    for path in written:
        _console(stderr=parsed.json).print(f"  {path}", soft_wrap=True)
    return 0 if recipe.chosen is not None else 1


def _analyze(parsed: Namespace) -> int:
    from batchscape.analysis.report.analyze import analyze
    from batchscape.analysis.targets.foreign import ReadOptions

    analysis = analyze(
        parsed.table,
        ReadOptions(
            group=parsed.group or [],
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


def _status(parsed: Namespace) -> int:
    from batchscape.record.folder import SweepFolder
    from batchscape.record.overview import overview, overview_text

    sweep = SweepFolder(parsed.dir)
    # A search that has no grid yet has only trials, which are shown in its place.
    has_trials_only = sweep.search.runs.exists() and not sweep.runs.exists()
    state = overview(sweep.search if has_trials_only else sweep)
    if parsed.json:
        return _say(state.as_json() + "\n")
    _console().print(overview_text(state))
    if sweep.slurm.is_dir():
        from batchscape.launch.slurm.launch import describe_jobs

        # Only on the cluster can the scheduler be asked for jobs.
        with suppress(LaunchError):
            _console().print(describe_jobs(sweep))
    return 0


def _cancel(parsed: Namespace) -> int:
    from batchscape.launch.slurm.launch import cancel
    from batchscape.record.folder import SweepFolder

    sweep = SweepFolder(parsed.dir)
    if not sweep.slurm.is_dir():
        raise ConfigError(
            f"{parsed.dir} has no jobs: nothing was launched there with launcher=slurm"
        )
    _console().print(f"Jobs cancelled: {cancel(sweep)}")
    return 0


def _sync(parsed: Namespace) -> int:
    from batchscape.tracking.sync import sync

    is_complete = sync(
        parsed.dir,
        _console(),
        project=parsed.project,
        entity=parsed.entity,
        timeout_s=parsed.timeout,
    )
    return 0 if is_complete else 1


def _doctor(parsed: Namespace) -> int:
    from batchscape.doctor import as_json, as_table, examine, is_fit

    findings = examine(parsed.dir)
    if parsed.json:
        _say(as_json(findings) + "\n")
    else:
        _console().print(as_table(findings))
    return 0 if is_fit(findings) else 1


def _check_config(arguments: list[str]) -> int:
    # The words behind -- are the launch command, whose options are not ours.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    # The parser would take `--NAME=WORD` behind --flag for one of our options.
    words: list[str] = []
    for argument in arguments[:end]:
        if words[-1:] == ["--flag"]:
            words[-1] += f"={argument}"
        else:
            words.append(argument)
    parsed = Parser("check-config").parse_args(words)
    from batchscape.interop.check import check_configs

    consistency = check_configs(
        parsed.file, arguments[end + 1 :], devices=parsed.devices, flags=parsed.flag
    )
    if parsed.json:
        _say(consistency.as_json() + "\n")
    else:
        _console().print(consistency.as_table(), soft_wrap=True)
    return 0 if consistency.is_consistent else 1


def _configs(parsed: Namespace) -> int:
    options = vars(parsed)
    from batchscape.geometry import solve
    from batchscape.interop.write import write_configs

    geometry = solve(
        nodes=options["nodes"],
        data_parallel_size=options["devices"],
        micro_batch_size=options["micro"],
        gradient_accumulation_steps=options["accumulation"],
        global_batch_size=options["global"],
    )
    written = write_configs(
        geometry,
        options["out"],
        precision=options["precision"],
        gradient_clip_norm=options["clip"] or None,
        zero_stage=options["zero"],
    )
    _console().print(f"devices x micro-batch x accumulation = {geometry}")
    for path in written:
        _console().print(f"  {path}", soft_wrap=True)
    return 0


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "sweep": _sweep,
    "run": _run,
    "plan": _plan,
    "probe": _probe,
    "recommend": _recommend,
    "check-config": _check_config,
    "geometry": _geometry,
}
"""Verbs that take settings of Hydra, or words of others."""
_PARSED_VERBS: dict[str, Callable[[Namespace], int]] = {
    "status": _status,
    "cancel": _cancel,
    "report": _report,
    "view": _view,
    "analyze": _analyze,
    "sync": _sync,
    "doctor": _doctor,
    "configs": _configs,
}


def _compose(arguments: list[str], verb: str, options: Sequence[str] = ()) -> SweepCells | None:
    from batchscape.compose import compose

    return compose(arguments, f"batchscape {verb}", options)


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

    if _is_search(grid):
        return _search(grid, _machine_here(grid), arguments)
    is_on_slurm = _is_on_slurm(grid)
    machine = _machine(grid) if is_on_slurm else _machine_here(grid)
    plan = _make_plan(grid, machine)
    console = _console()
    console.print(plan_summary(plan))
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
    console.print(f"Runs: {plan.sweep_dir}\n{_report_line(plan.sweep_dir)}", soft_wrap=True)
    if (untimed := result.untimed_text(sweep, command)) is not None:
        console.print(untimed, style="yellow", soft_wrap=True)
    return _code(result)


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
        console.print(_report_line(outcome.sweep_dir), soft_wrap=True)
    return _code(outcome.result) or int(not outcome.is_complete)


def _report_line(folder: Path) -> str:
    return f"Report: {shlex.join(['batchscape', 'report', str(folder)])}"


def _code(result: SweepResult) -> int:
    if result.interrupted:
        return 130
    return 1 if result.failed or result.why_stopped else 0


def _is_on_slurm(grid: SweepCells) -> bool:
    return bool(grid.cells[0].settings["launcher"]["name"] == "slurm")


def _is_search(grid: SweepCells) -> bool:
    return bool(grid.cells[0].settings["search"]["name"] != "none")


def _console(*, stderr: bool = False) -> Console:
    from batchscape.terminal import OutgoingConsole

    # Without a terminal there is no width to wrap at.
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _PIPE_WIDTH
    return OutgoingConsole(width=width, highlight=False, markup=False, stderr=stderr)


_PIPE_WIDTH = 160
_MULTIRUN = {"--multirun", "-m"}
