"""Measuring: memory, and the time of an optimizer step."""
