"""Figures of runs: losses, memory and times, and the style of every figure."""
