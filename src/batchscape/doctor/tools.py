"""Programs and packages beside the core: Weights & Biases, LaTeX, transformers."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata

from batchscape.doctor.children import ChildError, ask
from batchscape.doctor.finding import Finding

__all__ = ["latex", "tracker", "transformers"]

_TOOL_S = 10.0
_WANDB_S = 60.0


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
    try:
        subprocess.run(
            ["kpsewhich", "booktabs.sty"],  # noqa: S607  (the user's own)
            capture_output=True,
            timeout=_TOOL_S,
            check=True,
        )
    except (FileNotFoundError, subprocess.SubprocessError):  # absent, found none, or hangs
        return [Finding("LaTeX", "missing", "pdflatex without booktabs", repair)]
    return [Finding("LaTeX", "ok", "pdflatex with booktabs")]


def transformers() -> list[Finding]:
    """Look for the one optional package that settings need, without importing it."""
    try:
        return [Finding("transformers", "ok", metadata.version("transformers"))]
    except metadata.PackageNotFoundError:
        purpose = "for models (model=hf, hf_gpt2, hf_llama, hf_bert) and data.tokenizer=FOLDER"
        return [Finding("transformers", "missing", purpose, "pip install 'batchscape[hf]'")]
