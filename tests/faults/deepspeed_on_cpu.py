"""DeepSpeed, imported as the engine does for a CPU; for a server that forks many such ranks."""

import importlib
import os

os.environ["DS_ACCELERATOR"] = "cpu"
importlib.import_module("deepspeed")
del os.environ["DS_ACCELERATOR"]
