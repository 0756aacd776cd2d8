"""The figures of a part of `make gpu`: a file each, and their tables in docs/gpu.md.

python benchmarks/gpu/results.py    # writes the tables of all files into the page
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from batchscape.record.environment import _git_output, environment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"
HEADING = "## What was run where\n"

Row = dict[str, Any]


def cuda_device() -> torch.device:
    """Return the first CUDA device; leave with a word and code 0 where there is none."""
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).stem}: no CUDA device here; nothing was measured")
        sys.exit(0)
    return torch.device("cuda", 0)


def save(
    part: str, rows: list[Row], compared: list[Row] | None = None, *, so_far: bool = False
) -> None:
    """Write figures beside the name of the device, and print their tables.

    Parameters
    ----------
    part : str
        What was run; names the file.
    rows : list of dict
        Measured values, of the same names in each; None where there is none.
    compared : list of dict, optional
        Ratios and differences of them, likewise.
    so_far : bool
        More is to come: no table is printed yet.
    """
    of_device = where()
    slug = re.sub(r"[^a-z0-9]+", "-", of_device["device"].lower()).strip("-")
    path = RESULTS / slug / f"{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"part": part, **of_device, "rows": rows, "compared": compared or []}
    path.write_text(json.dumps(result, indent=2) + "\n")
    if not so_far:
        print(f"written: {path}\n\n{markdown(result)}", flush=True)


def where() -> Row:
    """Return device, versions, date and commit."""
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "driver": environment()["cuda"]["driver"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) or None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of the checkout, `-dirty` where its code differs or has new files.

    Results and their page are no code. A copy without the history of git is told its commit:
    `make gpu COMMIT=...`.
    """
    revision = _git_output(ROOT, "rev-parse", "HEAD")
    if revision is None:
        return os.environ.get("COMMIT")
    code = (".", ":!benchmarks/results", ":!docs/gpu.md")
    return revision + "-dirty" * (_git_output(ROOT, "status", "--porcelain", "--", *code) != "")


def markdown(result: Row) -> str:
    """Return the tables of a result, under a line that says where it is from."""
    known = {key: result[key] for key in ("driver", "torch", "cudnn", "nccl", "date", "commit")}
    said = ", ".join(
        f"{key} {'unknown' if value is None else value}" for key, value in known.items()
    )
    tables = [_table(rows) for rows in (result["rows"], result["compared"]) if rows]
    return "\n".join([f"### {result['part']}: {result['device']}", "", f"{said}.", "", *tables])


def _table(rows: list[Row]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def section() -> str:
    """Return what docs/gpu.md says under its last heading: the tables of all results there are."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json"))]
    if not results:
        return f"{HEADING}\nNothing has been run on a CUDA device yet.\n"
    return f"{HEADING}\n" + "\n".join(markdown(result) for result in results)


def main() -> None:
    before, _, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(before + section())


if __name__ == "__main__":
    main()
