"""What an engine says of itself, held against the run and against what it does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchscape.engines.base import Engine, Reported
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry


def check_reported(name: str, reported: Reported, geometry: BatchGeometry) -> None:
    """Hold the geometry that a library has against the one that a run was given.

    Parameters
    ----------
    name : str
        Of the engine.
    reported : Reported
        Numbers that are None are not compared.
    geometry : BatchGeometry

    Raises
    ------
    BatchscapeError
        If any number differs.
    """
    differing = {
        word: (has, wanted)
        for word, has in asdict(reported).items()
        if has is not None and has != (wanted := getattr(geometry, word))
    }
    if differing:
        said = "; ".join(
            f"{word} {has} instead of {wanted}" for word, (has, wanted) in differing.items()
        )
        msg = (
            f"engine={name} has another geometry than the run, which would train another global "
            f"batch: {said}"
        )
        raise BatchscapeError(msg)


def declared_bytes(engine: Engine, micro_steps: int) -> int:
    """Return the gradient bytes that a rank gives to the exchange in an optimizer step."""
    return engine.gradient_bytes * (micro_steps if engine.exchanges_every_micro_step else 1)


def check_exchanged(name: str, engine: Engine, exchanged: int, micro_steps: int) -> None:
    """Hold the gradient bytes that were exchanged against those that the engine declares.

    Parameters
    ----------
    name : str
        Of the engine.
    engine : Engine
    exchanged : int
        Bytes that this rank gave to the exchange in one optimizer step.
    micro_steps : int
        Of that optimizer step.

    Raises
    ------
    BatchscapeError
        If they differ.
    """
    declared = declared_bytes(engine, micro_steps)
    if exchanged != declared:
        how = "every micro-step" if engine.exchanges_every_micro_step else "the last micro-step"
        msg = (
            f"engine={name} exchanged {exchanged} gradient bytes in an optimizer step of "
            f"{micro_steps} micro-steps, and declares {declared}: {engine.gradient_bytes} in {how}"
        )
        raise BatchscapeError(msg)


def declaration(engine: Engine) -> dict[str, Any]:
    """Return the columns of a row of `ranks` that an engine's word fills."""
    return {
        "exchanges_every_micro_step": engine.exchanges_every_micro_step,
        "declared_exchange_bytes": engine.gradient_bytes,
        **{f"reported_{word}": has for word, has in asdict(engine.reported()).items()},
    }
