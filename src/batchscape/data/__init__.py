"""Data: the corpora, the order of their samples, and the batches made of them."""

from batchscape.data.corpus import prepare

__all__ = ["prepare"]
