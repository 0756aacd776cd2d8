"""Sweeps side by side, and the smallest difference that their seeds could have shown."""
