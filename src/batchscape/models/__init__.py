"""Models: the smallest honest workloads."""

from batchscape.models.build import LossModule, build_model, parameter_count

__all__ = ["LossModule", "build_model", "parameter_count"]
