"""Data: the corpora, the order of their samples, and the batches made of them."""
