"""Sweeps side by side, and the pairs of runs that comparisons rest on."""
