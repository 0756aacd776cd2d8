from __future__ import annotations

import warnings

import pytest
import torch

from unwaiting import no_waiting


def test_waiting_is_forbidden_for_the_block_alone_whatever_torch_warns_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warnings are errors here, as they are in the tests on a device."""
    modes: list[str] = []

    def switch(mode: str) -> None:
        if not modes:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    with pytest.raises(ZeroDivisionError), no_waiting():
        raise ZeroDivisionError(*modes)
    assert modes == ["error", "default"]
    with pytest.raises(UserWarning), no_waiting():
        warnings.warn("of the code under test", stacklevel=1)
