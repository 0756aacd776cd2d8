"""`batchscape doctor`: what this machine has, what is missing, and how to repair it."""

from batchscape.doctor.examine import Examination, examine
from batchscape.doctor.finding import Finding

__all__ = ["Examination", "Finding", "examine"]
