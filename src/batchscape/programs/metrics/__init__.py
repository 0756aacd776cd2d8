"""Reading the metrics of other people's programs, and the batch that they really used.

`open_reader` returns a reader, whose `read` gives a `Log`: rows of the tables `steps` and
`evals`, the batch as observed with a source for each number, and contradictions. A number that
a program does not log as the tables define it stays missing, with the reason.
"""

from batchscape.programs.metrics.log import Log, Observed, Reader
from batchscape.programs.metrics.open import open_reader

__all__ = ["Log", "Observed", "Reader", "open_reader"]
