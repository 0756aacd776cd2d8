"""What a trial of several runs comes to, from the folders of its runs."""

import math
from dataclasses import replace

import pytest

from batchscape.record.folder import SweepFolder
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.search.objective import outcome_of


@pytest.mark.parametrize(
    ("outcomes", "state", "value"),
    [
        ([(Status.COMPLETED, 1.0), (Status.COMPLETED, 4.0)], "completed", 2.5),
        ([(Status.COMPLETED, 1.0), (Status.DIVERGED, None)], "diverged", math.inf),
        ([(Status.OOM, None), (Status.COMPLETED, 1.0)], "oom", math.inf),
        ([(Status.COMPLETED, 1.0), (Status.FAILED, None)], "failed", None),
        ([(Status.COMPLETED, 1.0), (Status.PRUNED, None)], "pruned", None),
    ],
)
def test_a_trial_is_the_mean_of_its_seeds_and_infinitely_bad_where_one_cannot_train(
    outcomes, state, value, spec_of, tmp_path
):
    sweep, specs = SweepFolder(tmp_path), []
    for seed, (status, loss) in enumerate(outcomes):
        spec = replace(spec_of(seed=seed), run_id=f"seed-{seed}")
        attempts = [Attempt(1.0, 0, 2.0, str(status))]
        record = RunStatus(status, StopReason.BUDGET, attempts=attempts)
        record.summary = {"final_eval_loss": loss}
        sweep.run(spec.run_id).path.mkdir(parents=True)
        record.write(sweep.run(spec.run_id).status)
        specs.append(spec)
    outcome = outcome_of(specs, sweep, "loss")
    assert (outcome.state, outcome.value) == (state, value)
