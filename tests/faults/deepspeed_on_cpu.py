"""DeepSpeed, imported as the engine does for a CPU; for a server that forks many such ranks."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # noqa: F401

del os.environ["DS_ACCELERATOR"]
