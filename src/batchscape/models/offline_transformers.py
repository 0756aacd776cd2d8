"""`transformers`, which takes seconds to import: a fork server does it once, for every rank.

Raises ImportError where the extra `hf` is not installed.
"""

from __future__ import annotations

import importlib
import os

# Local files only, whatever a folder refers to; the library reads it when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

library = importlib.import_module("transformers")
# What every model needs; the library itself would import it with the first one.
importlib.import_module("transformers.modeling_utils")
library.utils.logging.disable_progress_bar()
