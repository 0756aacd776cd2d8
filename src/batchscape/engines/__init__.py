"""Engines: how one optimizer step is executed."""

from batchscape.engines.base import Engine
from batchscape.engines.build import build_engine

__all__ = ["Engine", "build_engine"]
