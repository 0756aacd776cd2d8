"""What the exchange costs within a node and between nodes, apart.

The exchange of a training is one operation over all ranks, of which no clock can tell which part
went where. So both are measured by themselves once the training is over, as an exchange in two
levels does them: the ranks of each node add up the bytes of a gradient among themselves; then each
rank adds up its share of them with those that have the same place on the other nodes, all shares
at the same time, so that one gradient leaves each node. A backend may be faster than both together,
where it does them at once.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

__all__ = ["NodeExchange", "groups_of", "node_exchange"]

_PART_BYTES = 1 << 25
"""Bytes at a time: as engines exchange buckets, and little beside the memory of a training."""
_REPEATS = 5
_LONGEST_S = 5.0
"""Time that one of the two may take in all, unless one exchange takes longer."""


class NodeExchange(NamedTuple):
    """Times to add up the bytes of a gradient, in seconds."""

    exchange_within_node_s: float | None = None
    """Among the ranks of a node; None where a node has one rank."""
    exchange_between_nodes_s: float | None = None
    """Among the nodes, each rank of a node with its share of the bytes."""


def groups_of(ranks: int, devices_per_node: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that exchange within a node, and those that do between nodes.

    Parameters
    ----------
    ranks : int
        In all, those of a node following each other.
    devices_per_node : int
        Ranks of a node.
    """
    nodes = range(0, ranks, devices_per_node)
    within = [list(range(first, first + devices_per_node)) for first in nodes]
    return within, [list(places) for places in zip(*within, strict=True)]


def node_exchange(size: int, devices_per_node: int, device: torch.device) -> NodeExchange:
    """Measure both; called by all ranks of a run over several nodes.

    Parameters
    ----------
    size : int
        Bytes of a gradient.
    devices_per_node : int
        Ranks of a node.
    device : torch.device
        Of this rank.

    Returns
    -------
    NodeExchange
        Medians of this rank; nothing where memory or the backend fails.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # connections of NCCL take memory beside torch's
    try:
        within, between = (
            dist.new_subgroups_by_enumeration(groups)[0]
            for groups in groups_of(dist.get_world_size(), devices_per_node)
        )
        return NodeExchange(
            exchange_within_node_s=_time_s(size, within, device) if devices_per_node > 1 else None,
            exchange_between_nodes_s=_time_s(size / devices_per_node, between, device),
        )
    except RuntimeError:  # of torch: a training that is over does not fail by it
        return NodeExchange()


def _time_s(size: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    part = torch.zeros(max(1, min(int(size), _PART_BYTES) // 4), device=device)
    return size / part.nbytes * _median_s(part, group)


def _median_s(part: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    first = torch.tensor(_exchange_s(part, group), device=part.device)
    # All ranks repeat it as often; the first one opens connections.
    dist.all_reduce(first, dist.ReduceOp.MAX)
    repeats = max(1, min(_REPEATS, int(_LONGEST_S / float(first))))
    return statistics.median(_exchange_s(part, group) for _ in range(repeats))


def _exchange_s(part: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(part, group=group)
    if part.device.type == "cuda":
        torch.cuda.synchronize(part.device)
    return time.perf_counter() - began
