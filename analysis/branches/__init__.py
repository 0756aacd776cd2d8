"""The critical batch as training goes on: branches, and ramps that follow it."""
