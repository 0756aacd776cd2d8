"""From run folders, or any table, to numbers, tables, figures and a report.

Everything here takes and returns DataFrames: `load` reads sweep folders, `find_cells` sorts runs
into cells, and `write_report` writes all there is to say of them. What `__all__` names can be had
alone, also for data that batchscape did not produce; their columns are in
`docs/analysis_tables.md`. No runtime of the training is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchscape.analysis.public import *  # noqa: F403  (type checkers cannot see into `__getattr__`)
    from batchscape.analysis.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Import everything once anything is asked for: a launch asks for one module alone."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        public = importlib.import_module("batchscape.analysis.public")
        try:
            # A module of the package has become a name of it by now.
            return {**globals(), **vars(public)}[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        """Name what is there to import."""
        public: list[str] = importlib.import_module("batchscape.analysis.public").__all__
        return [*globals(), *public]
