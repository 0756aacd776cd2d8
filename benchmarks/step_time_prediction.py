"""How far step times of geometries are off that three short trainings predict.

All cuts of one global batch on one device train, several times each. Of every choice of three
trainings that leaves others within their range (the smallest micro-batch, the largest and one
between) the cost model is fitted as `batchscape plan` fits it, and the step times of the other
cuts are predicted. The interval should cover 95 % of them. Where the three do not identify the time
of a cut there is no prediction, which is counted. Beside it stands how far two runs of one cut are
apart, which no prediction can know.

    python benchmarks/step_time_prediction.py [--repeats 3] [--models gpt_micro mlp] [--steps N]
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.cost.table import FACTORS, TIME_PARTS
from batchscape.analysis.hardware import add_machines
from batchscape.record.tables import load

_BATCH = 64
_STEPS = {"gpt_micro": 40, "mlp": 800}
"""Optimizer steps of a run: some seconds of each model."""
_DATA = {"mlp": ["data=digits", "optimizer=sgd"]}
_LEAST = 5


def trained(model: str, optimizer_steps: int, repeats: int, folder: Path) -> pd.DataFrame:
    """Train every cut; return one row a run with valid times."""
    words = [
        *("batchscape", "sweep", f"model={model}", *_DATA.get(model, ())),
        *("batch.micro_batch_size=1,2,4,8,16,32,64", f"batch.global_batch_size={_BATCH}"),
        f"budget.samples={_BATCH * optimizer_steps}",
        "evaluation.every_samples=null",
        f"seed=range(0,{repeats})",
        "measure.noise_scale_every=null",
        f"sweep_dir={folder}",
    ]
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)
    runs = add_machines(load(folder, columns={"steps": (), "evals": (), "ranks": ()}).runs)
    return runs[runs["status"].eq("completed")]


def predicted(runs: pd.DataFrame) -> pd.DataFrame:
    """Predict each cut by every three trainings that it is not among.

    Returns
    -------
    DataFrame
        `error_pct` (NaN where the time is not identified) and `covered` of each run that each
        three trainings are asked for.
    """
    by_micro = dict(iter(runs.groupby("micro_batch_size")))
    sizes = sorted(by_micro)
    found = []
    for between in sizes[1:-1]:
        probes = [by_micro[size].index for size in (sizes[0], between, sizes[-1])]
        for three in itertools.product(*probes):
            model = fit_step_time(
                runs.loc[list(three), ["run_id", *FACTORS, *TIME_PARTS, "step_time_s"]]
            )
            for size in sizes[1:-1]:
                if size == between:
                    continue
                told = model.at(1, size, _BATCH // size)
                for measured in by_micro[size]["step_time_s"]:
                    covered = told.low <= measured <= told.high
                    found.append((size, 100 * (told.value / measured - 1), covered))
    return pd.DataFrame(found, columns=["micro_batch_size", "error_pct", "covered"])


def apart(runs: pd.DataFrame) -> str:
    """Say how far two runs of one cut are apart; nothing where no cut ran twice."""
    times = (of_cut for _, of_cut in runs.groupby("micro_batch_size")["step_time_s"])
    pairs = [pair for of_cut in times for pair in itertools.permutations(of_cut, 2)]
    if not pairs:
        return ""
    median = np.median([100 * abs(one / other - 1) for one, other in pairs])
    return f"; two runs of one cut are {median:.1f} % apart in the median"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=_STEPS, default=list(_STEPS))
    parser.add_argument("--steps", type=int, help="optimizer steps a run; default: some seconds")
    parsed = parser.parse_args()
    for model in parsed.models:
        with tempfile.TemporaryDirectory() as folder:
            steps = parsed.steps or _STEPS[model]
            every = trained(model, steps, parsed.repeats, Path(folder) / "sweep")
        runs = every[every["timing_valid"]].reset_index(drop=True)
        print(f"{model}: {len(runs)} of {len(every)} runs have valid times")
        if runs["micro_batch_size"].nunique() < _LEAST:
            print("  too few cuts with valid times: the machine was busy")
            continue
        asked = predicted(runs)
        error = asked[asked["error_pct"].notna()]
        unknown = len(asked) - len(error)
        if error.empty:
            print(f"  none of {len(asked)} times of held-out cuts is identified by three trainings")
            continue
        size = error["error_pct"].abs()
        print(
            f"  {len(error)} predictions of held-out cuts by three trainings: median error "
            f"{size.median():.1f} %, 90 % within {np.percentile(size, 90):.1f} %, worst "
            f"{size.max():.1f} %; the 95 % interval covers {100 * error['covered'].mean():.0f} %"
            f"; {unknown} further times are not identified{apart(runs)}"
        )


if __name__ == "__main__":
    main()
