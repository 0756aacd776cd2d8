"""Measure how devices x micro-batch x accumulation decide memory, step time and convergence."""

__all__ = ["__version__"]

__version__ = "0.1.0"
