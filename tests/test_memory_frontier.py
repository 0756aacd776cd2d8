"""A smaller device, emulated, from the command line to the report: where memory ends."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest

from batchscape.cli import main
from batchscape.record.tables import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is of Linux"),
]

SETTINGS = (
    "batch=vary_global",
    "batch.gradient_accumulation_steps=1",
    "budget=optimizer_steps",
    "budget.optimizer_steps=4",
    "evaluation.every_samples=null",
    "evaluation.samples=16",
    "measure.noise_scale_every=null",
    "launcher.device=cpu",
    "tracker=none",
)


def test_a_sweep_finds_the_frontier_and_the_report_shows_it(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    where = f"sweep_dir='{sweep}'"
    assert main(["plan", "--json", *SETTINGS, "batch.micro_batch_size=40", where]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    # Too little for these tensors, and too near to them to be refused before it is tried.
    limit = round(0.995 * run["memory"]["peak_allocated_gib"]["value"], 4)

    def launch(*micros: int) -> int:
        swept = f"batch.micro_batch_size={','.join(map(str, micros))}"
        return main(["sweep", *SETTINGS, f"device.memory_limit_gib={limit}", swept, where])

    assert launch(20, 40) == 1, capsys.readouterr()
    runs = load(sweep).runs.set_index("micro_batch_size")
    assert runs["status"].to_dict() == {20: "completed", 40: "oom"}
    assert runs.loc[40, "cause"] == "out_of_memory"
    assert "out of memory in " in runs.loc[40, "reason"]
    assert (runs["memory_limit_gib"] == limit).all()
    assert runs.loc[20, "peak_allocated_gib"] < runs.loc[20, "peak_taken_gib"] < limit

    # A cell more: what was learnt rules it out, and nothing else is launched.
    assert launch(20, 40, 41) == 1, capsys.readouterr()
    runs = load(sweep).runs.set_index("micro_batch_size")
    assert runs["status"].to_dict() == {20: "completed", 40: "oom", 41: "rejected"}
    assert runs["attempts"].to_dict() == {20: 1, 40: 1, 41: 0}
    witness = runs.loc[40, "run_id"]
    assert runs.loc[41, "reason"] == (
        "not launched: micro_batch_size 40 ran out of memory with all else alike on 1 device of "
        f"{limit:g} GiB each (run {witness}), and 41 is larger; launcher.skip_unfit=false "
        "launches it"
    )

    capsys.readouterr()
    assert main(["report", str(sweep)]) == 0
    printed = capsys.readouterr().out
    table = pd.read_csv(sweep / "report" / "tables" / "memory_frontier.csv")
    (row,) = table.to_dict("records")
    assert (row["last_fit"], row["first_out"]) == (20, 40)
    assert (row["n_fit"], row["n_out"], row["n_skipped"]) == (1, 1, 1)
    assert row["margin_gib"] == pytest.approx(limit - runs.loc[20, "peak_taken_gib"])
    assert "micro-batch 20 is the last that fit, 40 the first that ran out" in printed
    page = (sweep / "report" / "report.md").read_text()
    left_out = page.split("## Left out, and to be kept in mind")[1].split("\n## ")[0]
    assert "1 run had" not in left_out
    assert "3 runs had a device of less memory" in left_out
    for name in (
        *("paper/tables/memory_frontier.tex", "paper/figures/memory_frontier.pdf"),
        "figures/memory_frontier.png",
    ):
        assert (sweep / "report" / name).exists()
