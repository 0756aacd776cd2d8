"""Record the sweep folders that two commits' reports are compared on.

    python tests/guards/record_sweeps.py FOLDER [demo statuses search examples]

`statuses` is written without any training, in seconds: a run of every status, with seeds, global
batches and learning rates around them. The others train here for minutes, with the commands of
their pages. What is there already is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT = (
    "budget=optimizer_steps",
    "budget.optimizer_steps=40",
    "evaluation.samples=64",
    "evaluation.batch_size=64",
)
TRAINED: dict[str, list[tuple[str, list[str]]]] = {
    "demo": [
        ("fixed_global_batch_digits", ["sweeps=fixed_global_batch_digits"]),
        ("fewer_updates_digits", ["sweeps=fewer_updates_digits"]),
    ],
    "search": [
        (
            "searched",
            [
                *("data=digits", "model=mlp", "optimizer=sgd", "schedule.warmup_samples=0", *SHORT),
                *("batch.micro_batch_size=8", "batch.global_batch_size=8,16", "search=gp"),
                "optimizer.learning_rate=tag(log,interval(0.01,1))",
                "search.trials=8",
            ],
        )
    ],
    "examples": [
        ("own_model", ["--config-dir", ".", "sweeps=own_model"]),
        ("own_study", ["--config-dir", ".", "sweeps=wide_or_deep"]),
    ],
}


def write_statuses(path: Path) -> None:
    """Write a sweep with a run of every status, by the writers of the analysis' tests."""
    place = ROOT / "tests" / "analysis" / "conftest.py"
    described = importlib.util.spec_from_file_location("analysis_conftest", place)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    sweep = module.SweepBuilder(path, "every_status", {}, path.parent / ".kept")
    sweep.fork()
    for seed in (0, 1, 2):
        for micro in (8, 16, 64):
            for rate in (5e-4, 1e-3, 2e-3):
                sweep.run(
                    (1, micro, 1),
                    seed=seed,
                    optimizer_steps=1280 // micro,
                    optimizer={"name": "adamw", "learning_rate": rate},
                )
        sweep.run((1, 128, 1), seed=seed, stop_reason="target", done=9, optimizer_steps=10)
    for number, (status, reason) in enumerate(
        {
            "oom": "out of memory in forward",
            "diverged": "the loss of optimizer step 12 is not finite",
            "timeout": "longer than launcher.run_timeout_s",
            "failed": "rank 0 raised ValueError",
            "interrupted": "stopped by the user",
            "pruned": "above the median of the others",
            "pending": None,
        }.items()
    ):
        sweep.run((2, 8, 2 + number), status=status, reason=reason, done=12)


def main() -> int:
    """Record what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="*", default=["statuses", *TRAINED])
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if "statuses" in asked.kinds and not (folder / "every_status").exists():
        write_statuses(folder / "every_status")
    codes = {}
    for kind, sweeps in TRAINED.items():
        for name, arguments in sweeps if kind in asked.kinds else ():
            place = ROOT / "examples" / name if kind == "examples" else folder
            command = [sys.executable, "-m", "batchscape", "sweep", *arguments]
            command.append(f"sweep_dir={folder / name}")
            own = str(ROOT / "src")
            environment = os.environ | {"PYTHONPATH": own, "OMP_NUM_THREADS": "1"}
            codes[name] = subprocess.run(
                command, cwd=place, env=environment, check=False
            ).returncode
    sys.stdout.writelines(f"{name}: exit code {code}\n" for name, code in codes.items())
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
