"""Runs in jobs of a Slurm cluster.

The command plans, submits and follows jobs (`launch`); in its allocation a job (`job`) is a
launcher like any other, on the same sweep folder. `docs/slurm.md` shows it.
"""
