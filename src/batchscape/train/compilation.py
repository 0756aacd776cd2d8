"""How often the compiler may compile the same code before it gives up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchscape.errors import BatchscapeError
from batchscape.text import count_text

__all__ = ["code_for_each_size"]

_VARIANTS = 8
"""Of one function, for each size of a micro-batch: as many as torch allows a function in all."""


@contextmanager
def code_for_each_size(sizes: int) -> Iterator[None]:
    """Let every size of a micro-batch have code of its own, and fail where that is not enough.

    Torch would go on with code that is not compiled, and say so in a warning alone.

    Parameters
    ----------
    sizes : int
        Sizes of micro-batches.

    Raises
    ------
    BatchscapeError
        If a function of the model is to be compiled more often.

    Notes
    -----
    Source: `recompile_limit`, `accumulated_recompile_limit` and `fail_on_recompile_limit_hit` of
    `torch._dynamo.config`; "Dealing with Recompilations",
    https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html.
    """
    import torch._dynamo  # takes a second, and only compiled runs need it
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limit = _VARIANTS * sizes
    with torch._dynamo.config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(limit, torch._dynamo.config.accumulated_recompile_limit),
        fail_on_recompile_limit_hit=True,
    ):
        try:
            yield
        except FailOnRecompileLimitHit as error:
            each = count_text(sizes, "size of micro-batches", "sizes of micro-batches")
            msg = (
                f"engine.compile: a function of the model would be compiled more than {limit} "
                f"times, {_VARIANTS} for {each}, as its inputs or settings differ from "
                "step to step (TORCH_LOGS=recompiles says how); let them be the same, or use "
                "engine.compile=false"
            )
            raise BatchscapeError(msg) from error
