"""Which devices are meant, held against torch's reader of the same variable."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchscape.cuda_devices import visible_indices, visible_problem

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("nonsense", []),
        ("MIG-0b1c", []),
    ],
)
def test_visible_devices(variable: str | None, expected: list[int]) -> None:
    assert visible_indices(variable, UUIDS) == expected


ENTRIES = st.one_of(
    st.integers(-2, 4).map(str),
    st.sampled_from(["", " ", "0x", "1a", "+2", " 1", "2 ", "a", "-", "GPU", "GPU-", "none"]),
    st.sampled_from([uuid[:length] for uuid in UUIDS for length in range(3, 9)]),
)


@given(st.lists(ENTRIES, max_size=5).map(",".join))
@example("GPU-aa11,GPU-aa11")
@example("9,9")
def test_as_torch_reads_it(variable: str) -> None:
    from torch import cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", variable)
        patch.setattr(cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
        patch.setattr(cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
        try:
            count = cuda._device_count_nvml()
            entries = cuda._parse_visible_devices()
        except ValueError:
            # A sign without a number is too much for it.
            return
        if entries and isinstance(entries[0], str):
            entries = cuda._transform_uuid_to_ordinals(entries, UUIDS)
    indices = visible_indices(variable, UUIDS)
    assert len(indices) == count
    assert indices == entries[:count]


@pytest.mark.parametrize("variable", [None, "", "-1", " ", "NoDevFiles", "none", "0", "2,7"])
def test_what_is_clear_or_hidden_on_purpose_is_no_problem(variable: str | None) -> None:
    assert visible_problem(variable, ["a"] * 3, UUIDS, None) is None


@pytest.mark.parametrize("variable", ["7", "GPU-typo", "cuda:0", "0,0", "GPU-aa"])
def test_a_choice_of_nothing_by_mistake(variable: str) -> None:
    problem = str(visible_problem(variable, ["a"] * 3, UUIDS, None))
    assert problem.startswith(
        f"CUDA_VISIBLE_DEVICES={variable} names no CUDA device of this machine"
    )
    assert "are 0 to 2" in problem
    # Where there is no device at all, nobody asked for one.
    assert visible_problem(variable, [], [], None) is None


def test_numbers_among_unlike_devices_are_ambiguous() -> None:
    """CUDA counts the fastest first, NVML and nvidia-smi by the PCI bus."""
    models = ["display", "fast", "fast"]
    problem = str(visible_problem("0", models, UUIDS, None))
    assert "several models here (display, fast); set CUDA_DEVICE_ORDER=PCI_BUS_ID" in problem
    assert visible_problem("0", models, UUIDS, "FASTEST_FIRST") == problem
    assert visible_problem("0", models, UUIDS, "PCI_BUS_ID") is None
    assert visible_problem("GPU-aa11", models, UUIDS, None) is None
    # All of them, in whatever order.
    assert visible_problem("2,1,0", models, UUIDS, None) is None
    assert visible_problem("0", ["fast"] * 3, UUIDS, None) is None
