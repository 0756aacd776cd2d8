"""All programs of this folder on as many ranks as their traps need, from one process."""

from __future__ import annotations

import sys
from pathlib import Path

from forked_ranks import free_port, preload, run_ranks

CASES = {
    "accelerate": (1, 2),
    "ddp": (2,),
    "deepspeed": (1,),
    "fabric": (2,),
    "trainer": (1, 2),
    "world": (2,),
}
HERE = Path(__file__).parent

out = Path(sys.argv[1])
preload(["torch", "transformers.trainer", "transformers.models.llama", "lightning_fabric"])
for program, counts in CASES.items():
    for ranks in counts:
        script = HERE / f"{program}_program.py"
        if run_ranks(str(script), [str(out / f"{program}-{ranks}.json")], ranks, free_port()):
            raise SystemExit(f"{program} on {ranks}")
