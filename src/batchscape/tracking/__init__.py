r"""Weights & Biases: one mapping from a run folder to a W&B run, live and by `batchscape sync`.

::

    mirror.py                 of a launch, and the process that it starts and ends
    sync.py                   the command, by the same process
    - - - - - - - - - - - -   another process from here on, the only one that loads wandb
    worker.py                 looks at the run folders
    run.py                    a run folder as a W&B run, named by labels.py
    report.py, workspace.py   the written report and a saved view, of a sweep
    state.py                  what W&B has of a run, of a report: `wandb.json`

Training neither waits for any of this nor knows of it. Whatever happens here, the run folders are
whole, and `batchscape sync` sends what W&B lacks.
"""
