"""The run folder: the truth about a run, written by its ranks and its launcher, read by all."""
