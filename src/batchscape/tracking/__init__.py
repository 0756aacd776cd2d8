r"""Weights & Biases: one mapping from a run folder to a W&B run, live and by `batchscape sync`.

::

    mirror.py                 mirror of a launch, which starts and ends a process
    sync.py                   the command, with the same process
    - - - - - - - - - - - -   another process from here on, the only one that loads wandb
    worker.py                 reads the run folders
    run.py                    a run folder as a W&B run, named by labels.py
    report.py, workspace.py   the report and a saved view of a sweep
    state.py                  state of a run or a report in W&B: `wandb.json`

Training neither waits for W&B nor knows of it. Whatever happens here, the run folders are complete,
and `batchscape sync` sends what W&B lacks.
"""
