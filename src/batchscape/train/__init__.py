"""Training one rank of a run."""
