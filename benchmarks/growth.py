r"""How plan, resume, status, report and claims grow with the runs of a sweep.

A grid is planned, its runs are made up in the real format as if all were done, and each command is
then called on them in a process of its own: time, and the peak of its memory. Claims are made and
released one after the other. Then runs are read once more as from a network file system whose
cache is cold: a shim lets each call that opens, looks at, lists or reads wait for an answer.

    python benchmarks/growth.py [--runs 1000 10000] [--seeds 10] [--round-trip-ms 0.5]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from report_at_scale import BATCHES, CUTS, READ, Cell, launch_of, measure, rows_of

from batchscape.cli import _compose
from batchscape.data.corpus import prepare
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.record.claims import CLAIMS
from batchscape.record.environment import environment as environment_here
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.record.summary import summarise
from batchscape.record.tables import write_sealed

POINTS = 100
"""Optimizer steps of a run."""
SHIM = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int is_there(const char *path) {
    const char *root = getenv("ROUND_TRIP_UNDER");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}
static void wait_for_answer(void) {
    struct timespec t = {0, atol(getenv("ROUND_TRIP_NS"))};
    nanosleep(&t, 0);
}
#define ASK(path) if (is_there(path)) wait_for_answer()
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OPEN(name) int name(const char *path, int flags, ...) { \
    REAL(name); va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
    ASK(path); return real(path, flags, mode); }
OPEN(open) OPEN(open64)
int openat(int at, const char *path, int flags, ...) {
    REAL(openat); va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more);
    ASK(path); return real(at, path, flags, mode); }
#define STAT(name) int name(const char *path, struct stat *found) { \
    REAL(name); ASK(path); return real(path, found); }
STAT(stat) STAT(lstat)
#define STAT64(name) int name(const char *path, struct stat64 *found) { \
    REAL(name); ASK(path); return real(path, found); }
STAT64(stat64) STAT64(lstat64)
int fstatat(int at, const char *path, struct stat *found, int flags) {
    REAL(fstatat); ASK(path); return real(at, path, found, flags); }
int fstatat64(int at, const char *path, struct stat64 *found, int flags) {
    REAL(fstatat64); ASK(path); return real(at, path, found, flags); }
int access(const char *path, int mode) { REAL(access); ASK(path); return real(path, mode); }
DIR *opendir(const char *path) { REAL(opendir); ASK(path); return real(path); }
static int is_there_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return is_there(path);
}
ssize_t read(int fd, void *to, size_t n) {
    REAL(read); if (is_there_fd(fd)) wait_for_answer(); return real(fd, to, n); }
ssize_t pread(int fd, void *to, size_t n, off_t at) {
    REAL(pread); if (is_there_fd(fd)) wait_for_answer(); return real(fd, to, n, at); }
ssize_t pread64(int fd, void *to, size_t n, off64_t at) {
    REAL(pread64); if (is_there_fd(fd)) wait_for_answer(); return real(fd, to, n, at); }
"""


FAR = "from batchscape.record import disk; disk.is_of_this_machine = lambda _: False; "
CALL = "import sys; from batchscape.cli import main; sys.exit(main(sys.argv[1:]))"
LOAD = f"import sys; from batchscape.record.tables import load; load(sys.argv[1], columns={READ!r})"


def arguments_of(runs: int, seeds: int, folder: Path) -> list[str]:
    """Return a grid of so many cells: batches x cuts x learning rates x seeds."""
    rates = runs // (len(BATCHES) * len(CUTS) * seeds)
    learning_rates = ",".join(f"{1e-4 * 1000 ** (n / rates):.6g}" for n in range(rates))
    return [
        *("batch=hold_global", f"batch.global_batch_size={','.join(map(str, BATCHES))}"),
        *("batch.data_parallel_size=1,2", "batch.micro_batch_size=4,8"),
        *(f"optimizer.learning_rate={learning_rates}", f"seed=range(0,{seeds})"),
        *("budget=optimizer_steps", f"budget.optimizer_steps={POINTS}"),
        *("model=gpt_micro", "evaluation.every_samples=256", "tracker=none", f"sweep_dir={folder}"),
    ]


def make_up(sweep: SweepFolder, arguments: list[str]) -> list[str]:
    """Write all runs of a grid as done; return their names."""
    specs = make_plan(_compose(arguments, "sweep"), Machine.detect(), prepare).specs
    with ProcessPoolExecutor() as pool:
        chunks = [specs[start : start + 100] for start in range(0, len(specs), 100)]
        list(pool.map(write_runs, repeat(sweep), chunks))
    return [spec.run_id for spec in specs]


def write_runs(sweep: SweepFolder, specs: list[RunSpec]) -> None:
    os.fsync = lambda _: None  # nothing here has to outlive a loss of power
    environment = environment_here(os.environ, 1)
    for spec in specs:
        run, geometry = sweep.run(spec.run_id), spec.geometry
        rate, batch = spec.config.optimizer.learning_rate, geometry.global_batch_size
        cut = (geometry.data_parallel_size, geometry.micro_batch_size)
        tables = rows_of(spec, Cell(batch, cut, rate, spec.config.seed), POINTS)
        spec.write(run.config)
        write_json(run.environment, environment)
        write_json(run.launch, launch_of(geometry.data_parallel_size))
        status = RunStatus(
            Status.COMPLETED,
            StopReason.BUDGET,
            attempts=[Attempt(1.0, 0, 2.0, "completed")],
        )
        status.summary = summarise(**tables, data_parallel_size=geometry.data_parallel_size)
        write_sealed(run, status, tables)


def seconds_to_claim(sweep: SweepFolder, names: list[str]) -> float:
    """Claim and release runs one after the other."""
    began = time.perf_counter()
    for run in map(sweep.run, names):
        CLAIMS.claim(run).release(is_over=True)
    return time.perf_counter() - began


def built(shim: Path) -> Path:
    """Compile the shim."""
    source = shim.with_suffix(".c")
    source.write_text(SHIM)
    command = ("gcc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl")
    subprocess.run(command, check=True)
    return shim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--round-trip-ms", type=float, default=0.5)
    options = parser.parse_args()
    of_a_rate = len(BATCHES) * len(CUTS) * options.seeds
    if any(runs < of_a_rate or runs % of_a_rate for runs in options.runs):
        parser.error(f"--runs are multiples of {of_a_rate}")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shim = built(scratch / "shim.so")
        for runs in options.runs:
            sweep, out = SweepFolder(scratch / str(runs)), scratch / "report"
            arguments = arguments_of(runs, options.seeds, sweep.path)
            names = make_up(sweep, arguments)
            print(f"{len(names)} runs", flush=True)
            folder = str(sweep.path)
            far = {
                "LD_PRELOAD": str(shim),
                "ROUND_TRIP_UNDER": folder,
                "ROUND_TRIP_NS": str(round(options.round_trip_ms * 1e6)),
            }
            answer = f"{options.round_trip_ms:g} ms an answer"
            for what, program, arguments_of_it, environment in (
                ("plan", CALL, ("plan", *arguments), {}),
                ("resume", CALL, ("sweep", *arguments), {}),
                ("status", CALL, ("status", folder), {}),
                ("load", LOAD, (folder,), {}),
                ("report", CALL, ("report", folder, "--out", str(out)), {}),
                (f"resume, {answer}", FAR + CALL, ("sweep", *arguments), far),
                (f"status, {answer}", FAR + CALL, ("status", folder), far),
                (f"load, {answer}", FAR + LOAD, (folder,), far),
            ):
                taken = measure(sys.executable, "-c", program, *arguments_of_it, **environment)
                print(f"  {what}: {taken.wall_s:.1f} s, {taken.peak_gib:.2f} GiB", flush=True)
            each_s = seconds_to_claim(sweep, names) / len(names)
            print(f"  claim and release: {1000 * each_s:.2f} ms a run", flush=True)
            shutil.rmtree(out)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
