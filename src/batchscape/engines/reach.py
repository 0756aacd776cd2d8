"""Which parameters a backward will bring a gradient for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.autograd.graph import Node

__all__ = ["unreached"]


def unreached(module: nn.Module, loss: Tensor) -> list[str]:
    """Name the trained parameters that the graph of a loss does not lead to.

    The graph may have been gone through by a backward before.

    Parameters
    ----------
    module : nn.Module
    loss : Tensor, scalar
    """
    reached: set[int] = set()
    seen: set[Node] = set()
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            reached.add(id(leaf))
        waiting += [following for following, _ in node.next_functions if following is not None]
    return [
        name for name, p in module.named_parameters() if p.requires_grad and id(p) not in reached
    ]
