r"""Weights & Biases: one mapping from a run folder to a W&B run, live and by `batchscape sync`.

::

    mirror.py (a launch)   sync.py (the command)
                  \         /
                  watch.py            starts a process, and ends it where it does not answer
    - - - - - - - - - | - - - - - - - another process from here on, the only one that loads wandb
                  worker.py           looks at the run folders, several at a time in `sync`
                  run.py              a run folder as a W&B run: names.py, labels.py, times.py
                  report.py           the written report as a run of its own
                  workspace.py        a saved view of the sweep, by wandb-workspaces
                  state.py            what W&B has of a run, of a report: `wandb.json`

Training neither waits for any of this nor knows of it. Whatever happens here, the run folders are
whole, and `batchscape sync` sends what W&B lacks.
"""
