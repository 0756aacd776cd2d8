"""Search instead of listing: trials by Optuna, then a small grid around the best of each study.

A trial is one combination of searched values; its runs differ by the seed alone, and are runs like
any other. Trials are chosen for their results, so that no interval can be estimated from them:
they have a folder of their own, and analysis uses the grid.
"""

from batchscape.search.search import search

__all__ = ["search"]
