"""Programs and packages beside the core: Slurm, Weights & Biases, LaTeX, optional packages."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata

from batchscape.doctor.children import ChildError, ask
from batchscape.doctor.finding import Finding

__all__ = ["OPTIONAL", "latex", "optional_packages", "slurm", "tracker"]

_SLURM = ("sbatch", "srun", "sinfo")
_TOOL_S = 10.0
_WANDB_S = 60.0

OPTIONAL = {
    "transformers": (
        "models of Hugging Face (model=hf, hf_gpt2, hf_llama, hf_bert) and its tokenizers",
        "pip install 'batchscape[hf]'",
    ),
    "tokenizers": (
        "tokenizers of Hugging Face (data.tokenizer=FOLDER)",
        "pip install 'batchscape[hf]'",
    ),
}
"""Packages that some settings need: for what, and how they are installed."""


def slurm() -> list[Finding]:
    """Look for Slurm's programs, which nothing here calls."""
    found = [name for name in _SLURM if shutil.which(name) is not None]
    there = f"found: {', '.join(found)}" if found else f"not found: {', '.join(_SLURM)}"
    detail = f"{there}; batchscape does not submit jobs itself yet"
    return [Finding("Slurm", "not needed", detail)]


def tracker() -> list[Finding]:
    """Ask W&B whether it knows a key, and say what follows from that."""
    try:
        answer = ask("tracker", _WANDB_S, WANDB_SILENT="true")
    except ChildError as error:
        repair = "pip install wandb, or use tracker=none"
        return [Finding("W&B", "broken", str(error), repair, needed=True)]
    if answer["known"]:
        detail = f"{answer['version']}, key for {answer['url']}: tracker.mode=auto is online"
        return [Finding("W&B", "ok", detail, needed=True)]
    detail = f"{answer['version']}, no key: tracker.mode=auto is offline"
    return [
        Finding("W&B", "ok", detail, needed=True),
        Finding("W&B key", "missing", "runs are kept until `batchscape sync`", "wandb login"),
    ]


def latex() -> list[Finding]:
    """Look for what typesets the tables of a report."""
    repair = "apt-get install texlive-latex-base texlive-latex-recommended"
    if shutil.which("pdflatex") is None:
        detail = "no pdflatex; reports are written without it"
        return [Finding("LaTeX", "missing", detail, repair)]
    if shutil.which("kpsewhich") is None or _run("kpsewhich", "booktabs.sty")[0]:
        return [Finding("LaTeX", "missing", "pdflatex without booktabs", repair)]
    return [Finding("LaTeX", "ok", "pdflatex with booktabs")]


def optional_packages() -> list[Finding]:
    """Look for optional packages, without importing them."""
    found = []
    for name, (purpose, repair) in OPTIONAL.items():
        try:
            found.append(Finding(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "missing", f"for {purpose}", repair))
    return found


def _run(*command: str) -> tuple[int, str]:
    """Return a program's exit code and what it says last."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} gave no answer within {_TOOL_S:g} s"
    if done.returncode:
        return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
    return 0, done.stdout
