"""A module that makes its process unfit for forking."""

from __future__ import annotations

import threading

from fake_workers import main, sleep_for_ever

threading.Thread(target=sleep_for_ever, daemon=True).start()

__all__ = ["main"]
