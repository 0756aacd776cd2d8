"""Ranks whose library is told nothing of the others."""

from __future__ import annotations

import torch.distributed as dist

from batchscape.engines import build
from batchscape.train import worker


def main(run_dir: str, rank: int) -> int:
    """Hide the process group while the engine is built."""
    real = build.build_engine

    def build_engine(*arguments, **options):
        shown, dist.is_initialized = dist.is_initialized, lambda: False
        try:
            return real(*arguments, **options)
        finally:
            dist.is_initialized = shown

    loop = __import__("batchscape.train.loop", fromlist=["build_engine"])
    loop.build_engine = build_engine
    return worker.main(run_dir, rank)
