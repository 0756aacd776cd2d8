"""Parameters and nodes that the backward of a loss reaches."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.autograd.graph import Node


def unreached(module: nn.Module, loss: Tensor) -> list[str]:
    """Return the names of trained parameters that the graph of a loss does not reach.

    The graph may have been gone through by a backward before.
    """
    reached = {id(getattr(node, "variable", None)) for node in graph_of(loss)}
    return [
        name for name, p in module.named_parameters() if p.requires_grad and id(p) not in reached
    ]


def graph_of(loss: Tensor) -> Iterator[Node]:
    """Go through the nodes of the graph of a loss, each once."""
    visited: set[Node] = set()
    node_stack = [] if loss.grad_fn is None else [loss.grad_fn]
    while node_stack:
        node = node_stack.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        node_stack += [following for following, _ in node.next_functions if following is not None]
