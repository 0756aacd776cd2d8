"""How far from the best learning rate each sampler ends, after how many trials.

`results/learning_rate_grid/runs.csv` is a grid that was trained once, before any sampler was tried:
25 learning rates x 5 global batches x 3 seeds on the default data. A search is replayed on it: what
a trial comes to is the held-out loss of one of the seeds, interpolated between the rates of the
grid. The regret is of the seeds that the search did not see: their mean loss at the rate that it
chose, above the least that theirs has at any rate of the grid. Its own seed would flatter a rate
that was lucky with it. The least of few noisy means is a little too low, for all alike. Everything
is repeated with other random numbers; intervals are 95 %, by bootstrap over these repetitions.

The peer is the plain grid of as many rates at equal ratios. As a person would lay it, from one end
of the interval to the other, it is what `search=grid` tries. There is one such grid, and whether a
rate of it lies near the optimum is luck; so the grid is also laid at every offset: as many rates,
equally far apart, that begin anywhere. Their mean is what somebody can expect who does not know
the optimum; the brackets have their range.

The rule that cuts trials is replayed on whole curves: how often would the best one be cut?

    python benchmarks/search_regret.py [--repeats 100] [--trials 4 6 8 12 16 24]
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
from optuna.storages import InMemoryStorage

from batchscape.config import Sampler
from batchscape.plan.expand import Interval
from batchscape.search.objective import TrialOutcome
from batchscape.search.space import Space
from batchscape.search.study import Study

DATA = Path(__file__).parent / "results" / "learning_rate_grid" / "runs.csv"
SAMPLERS = ("random", "tpe", "gp")
_TRIALS = 12
"""Trials of a study whose runs are cut."""
_WORST = 10.0
"""Loss, in nats, that stands for a training that diverged: worse than knowing nothing."""


class Losses:
    """Held-out losses of one global batch: seeds x rates."""

    def __init__(self, runs: pd.DataFrame) -> None:
        table = runs.pivot_table(
            index="seed", columns="learning_rate", values="loss", aggfunc="first", dropna=False
        )
        self._log_rates = np.log(table.columns.to_numpy(dtype=float))
        self._losses = table.fillna(_WORST).to_numpy(dtype=float)
        self.low, self.high = map(float, np.exp(self._log_rates[[0, -1]]))
        self.seeds = len(table)

    def one(self, rate: float, seed: int) -> float:
        """Return what a trial comes to."""
        return float(np.interp(math.log(rate), self._log_rates, self._losses[seed]))

    def regret(self, rate: float, seed: int) -> float:
        """Return how much above their least the mean over the seeds but this one is."""
        means = np.delete(self._losses, seed, axis=0).mean(axis=0)
        return float(np.interp(math.log(rate), self._log_rates, means) - means.min())


def space_of(losses: Losses, name: str, trials: int, seed: int) -> Space:
    """Return the search of one rate."""
    rate = Interval("rate", losses.low, losses.high, is_log=True)
    return Space(Sampler(name=name, trials=trials), (rate,), {}, (), seed)


def searched(losses: Losses, name: str, counts: Sequence[int], repeat: int) -> list[float]:
    """Replay one search; return the regret of its best trial after some numbers of trials."""
    seed = repeat % losses.seeds
    study = Study(space_of(losses, name, max(counts), repeat), "replayed", InMemoryStorage())
    best, regrets = (math.inf, 0.0), []
    for _ in range(max(counts)):
        asked = study.ask()
        rate = asked.params["rate"]
        value = losses.one(rate, seed)
        study.tell(asked.number, TrialOutcome("completed", value, None), [], {})
        best = min(best, (value, rate))
        regrets.append(losses.regret(best[1], seed))
    return [regrets[count - 1] for count in counts]


def listed(losses: Losses, rates: Sequence[float]) -> float:
    """Return the regret of the best of some rates, as the mean over the seeds it is chosen by."""

    def chosen_by(seed: int) -> float:
        return losses.regret(min(rates, key=lambda rate: losses.one(rate, seed)), seed)

    return float(np.mean([chosen_by(seed) for seed in range(losses.seeds)]))


def laid(losses: Losses, count: int) -> list[float]:
    """Return the rates of the plain grid from end to end."""
    return [point["rate"] for point in space_of(losses, "grid", count, 0).listed_points]


def begun_at(losses: Losses, count: int, offset: float) -> list[float]:
    """Return the rates of a plain grid that begins anywhere within one of its distances."""
    shares = (np.arange(count) + offset) / count
    return [float(rate) for rate in losses.low * (losses.high / losses.low) ** shares]


def random_space(points: int) -> Space:
    """Return what trials are asked of whose points do not matter."""
    place = Interval("place", 1, points, is_log=False)
    return Space(Sampler(name="random", trials=_TRIALS), (place,), {}, (), 0)


def cut(curves: pd.DataFrame, repeats: int, generator: np.random.Generator) -> str:
    """Replay the rule that cuts trials on full curves; say how often it cut the best one."""
    budget = int(curves["samples"].max())
    rates = curves["learning_rate"].unique()
    best_cut, cuts, saved = [], [], []
    for _, study in curves.groupby(["global_batch_size", "seed"]):
        by_rate = {
            rate: dict(zip(own["samples"], own["loss"], strict=True))
            for rate, own in study.groupby("learning_rate")
        }
        # Orders x trials: whether it was cut, and where.
        until = np.full((repeats, _TRIALS), budget)
        best = np.zeros(repeats, dtype=int)
        for repeat in range(repeats):
            chosen = [by_rate[rate] for rate in generator.permutation(rates)[:_TRIALS]]
            best[repeat] = min(range(_TRIALS), key=lambda place: chosen[place][budget])
            replayed = Study(random_space(budget), "replayed", InMemoryStorage())
            for place, curve in enumerate(chosen):
                number = replayed.ask().number
                outcome = TrialOutcome("completed", curve[budget], None)
                if replayed.loss_at_cut(number, curve, budget) is not None:
                    until[repeat, place] = replayed.trials[number].last_step
                    outcome = TrialOutcome("pruned", None, None)
                replayed.tell(number, outcome, [], {})
        is_out = until < budget
        best_cut.append(is_out[np.arange(repeats), best].mean())
        cuts.append(is_out.mean())
        saved.append(1 - until.mean() / budget)
    low, high = interval(np.array(best_cut), generator)
    return (
        f"search.pruner=median on {len(cuts)} studies of {_TRIALS} random trials, each in "
        f"{repeats} orders: the best trial was cut in {100 * np.mean(best_cut):.1f} % "
        f"[{100 * low:.1f}, {100 * high:.1f}]; {100 * np.mean(cuts):.0f} % of all trials were "
        f"cut, which saved {100 * np.mean(saved):.0f} % of the samples"
    )


def interval(values: np.ndarray, generator: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % interval of a mean, by bootstrap over the repetitions."""
    drawn = generator.integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def text_of(mean: float, ends: tuple[float, float]) -> str:
    """Write a regret and two ends of it in thousandths."""
    return f"{1000 * mean:.1f} [{1000 * ends[0]:.1f}, {1000 * ends[1]:.1f}]"


def show(name: str, cells: Sequence[str]) -> None:
    """Print a line of the table."""
    print(f"{name:>8}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--trials", type=int, nargs="+", default=[4, 6, 8, 12, 16, 24])
    parsed = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    runs = pd.read_csv(DATA)
    batches = {int(str(batch)): Losses(own) for batch, own in runs.groupby("global_batch_size")}
    generator = np.random.default_rng(0)
    print(
        f"{len(runs)} runs: {runs['learning_rate'].nunique()} learning rates x {len(batches)} "
        f"global batches x {runs['seed'].nunique()} seeds; {parsed.repeats} repetitions"
    )
    print("regret in thousandths of a nat, mean over the global batches")
    print("[95 % interval over the repetitions; of any grid: range over the offsets]")
    show("trials", list(map(str, parsed.trials)))
    regrets = {
        "grid": [
            float(np.mean([listed(of, laid(of, count)) for of in batches.values()]))
            for count in parsed.trials
        ]
    }
    show("grid", [f"{1000 * value:.1f}" for value in regrets["grid"]])
    # offsets x trials, each a mean over the global batches
    offsets = np.array(
        [
            [
                np.mean([listed(of, begun_at(of, count, offset)) for of in batches.values()])
                for count in parsed.trials
            ]
            for offset in (np.arange(parsed.repeats) + 0.5) / parsed.repeats
        ]
    )
    regrets["any grid"] = [float(mean) for mean in offsets.mean(axis=0)]
    ranges = zip(offsets.min(axis=0), offsets.max(axis=0), strict=True)
    show("any grid", list(map(text_of, regrets["any grid"], ranges)))
    for name in SAMPLERS:
        # repeats x trials, each a mean over the global batches
        found = np.mean(
            [
                [searched(of, name, parsed.trials, repeat) for repeat in range(parsed.repeats)]
                for of in batches.values()
            ],
            axis=0,
        )
        regrets[name] = [float(mean) for mean in found.mean(axis=0)]
        intervals = (interval(values, generator) for values in found.T)
        show(name, list(map(text_of, regrets[name], intervals)))
    for peer in ("grid", "any grid"):
        for name in SAMPLERS:
            halves = [
                f"{count} against {2 * count}: {'yes' if regret <= regrets[peer][place] else 'no'}"
                for count, regret in zip(parsed.trials, regrets[name], strict=True)
                if 2 * count in parsed.trials
                for place in [parsed.trials.index(2 * count)]
            ]
            print(f"{name} with half the trials is as good as {peer}? {'; '.join(halves)}")
    print(cut(pd.read_csv(DATA.with_name("curves.csv")), parsed.repeats, generator))


if __name__ == "__main__":
    main()
