"""Variables of the environment while a library is set up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(values: Mapping[str, str], *, without: tuple[str, ...]) -> Iterator[None]:
    """Set variables of the environment, hide others, and put all of them back at the end."""
    hidden = {name for name in os.environ if name.startswith(without)}
    before = {name: os.environ.get(name) for name in hidden | set(values)}
    for name in hidden:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
