"""One of four ranks on two nodes, with an exchange whose time is told by a clock of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from batchscape.measure import node_exchange as measured

SECONDS = {"within": 0.25, "between": 2.0}


def main(folder: str, rank: int) -> None:
    """Check what is exchanged among whom, and print what was measured."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    now, repeats = 0.0, {"within": 0, "between": 0}
    exchange = dist.all_reduce

    def all_reduce(part: torch.Tensor, *args: Any, group: dist.ProcessGroup | None = None) -> None:
        nonlocal now
        if group is None:
            exchange(part, *args)
            return
        ranks = dist.get_process_group_ranks(group)
        assert rank in ranks
        kind = "within" if ranks in ([0, 1], [2, 3]) else "between"
        assert kind == "within" or ranks in ([0, 2], [1, 3])
        part.fill_(rank)
        exchange(part, group=group)
        assert set(part.tolist()) == {sum(ranks)}
        now += SECONDS[kind]
        repeats[kind] += 1

    measured.dist.all_reduce = all_reduce
    measured.time.perf_counter = lambda: now
    found = measured.node_exchange(1 << 27, 2, torch.device("cpu"))
    print(json.dumps([*found, repeats["within"], repeats["between"]]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
