"""What an engine declares and reports, compared with the run and with what it exchanges."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchscape.engines.base import Engine, Reported
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry


def check_reported(name: str, reported: Reported, geometry: BatchGeometry) -> None:
    """Compare the geometry that a library reports with that of the run."""
    differences = [
        f"{word} {number} instead of {planned}"
        for word, number in asdict(reported).items()
        if number is not None and number != (planned := getattr(geometry, word))
    ]
    if differences:
        raise BatchscapeError(
            f"engine={name} reports another geometry than that of the run, so it would train "
            f"another global batch: {'; '.join(differences)}"
        )


def declared_bytes(engine: Engine, micro_steps: int) -> int:
    """Return the gradient bytes that a rank gives to the exchange in an optimizer step."""
    return engine.gradient_bytes * (micro_steps if engine.exchanges_every_micro_step else 1)


def check_exchanged(name: str, engine: Engine, exchanged: int, micro_steps: int) -> None:
    """Compare the gradient bytes that were exchanged with those that the engine declares."""
    declared = declared_bytes(engine, micro_steps)
    if exchanged != declared:
        how = "every micro-step" if engine.exchanges_every_micro_step else "the last micro-step"
        raise BatchscapeError(
            f"engine={name} exchanged {exchanged} gradient bytes in an optimizer step of "
            f"{micro_steps} micro-steps, and declares {declared}: {engine.gradient_bytes} in {how}"
        )


def declaration(engine: Engine) -> dict[str, Any]:
    """Return the columns of a row of `ranks` that an engine declares or reports."""
    return {
        "exchanges_every_micro_step": engine.exchanges_every_micro_step,
        "declared_exchange_bytes": engine.gradient_bytes,
        **{f"reported_{word}": number for word, number in asdict(engine.reported()).items()},
    }
