"""Python imports this at its start: `-m torch.distributed.run` runs `forked_ranks` instead."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


class _Finder:
    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        if name != "torch.distributed.run":
            return None
        return spec_from_file_location(name, Path(__file__).parents[1] / "forked_ranks.py")


if sys.orig_argv[1:3] == ["-m", "torch.distributed.run"]:
    sys.meta_path.insert(0, _Finder)
