"""Search instead of listing: trials by Optuna, then a small grid around the best of each study.

A trial is one combination of searched values; its runs, which differ by the seed alone, are runs
like any other. Trials are chosen for having done well, so that no interval can be made of them:
they live in a folder of their own, and analysis rests on the grid.
"""

from batchscape.search.search import search

__all__ = ["search"]
