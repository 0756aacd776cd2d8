"""Studies, one file each: `batchscape sweep sweeps=NAME`.

Under the package header, the first line says the question and the number of runs. The axes stand
in `hydra.sweeper.params`; the same key on the command line replaces an axis.
"""
