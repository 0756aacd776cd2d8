"""The identity is solved exactly, or refused with geometries that satisfy it."""

import math
import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.errors import ConfigError, GeometryError
from batchscape.geometry import BatchGeometry, enumerate_geometries, solve

counts = st.integers(1, 12)
geometries = st.builds(BatchGeometry, counts, counts, counts, counts)

ALL_NAMES = (
    "nodes",
    "devices_per_node",
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "global_batch_tokens",
)


def full(geometry, sequence_length):
    """Every name of the identity with the geometry's value, multiplied out by hand."""
    n, d = geometry.nodes, geometry.devices_per_node
    m, a = geometry.micro_batch_size, geometry.gradient_accumulation_steps
    values = (n, d, n * d, m, a, n * d * m * a, n * d * m * a * sequence_length)
    return dict(zip(ALL_NAMES, values, strict=True))


def refusal(**values):
    with pytest.raises(GeometryError) as caught:
        solve(**values)
    return caught.value


def test_identity_and_text():
    geometry = BatchGeometry(
        nodes=1, devices_per_node=2, micro_batch_size=8, gradient_accumulation_steps=2
    )
    assert (geometry.data_parallel_size, geometry.global_batch_size) == (2, 32)
    assert str(geometry) == "2 x 8 x 2 = 32"
    assert str(BatchGeometry(2, 4, 8, 2)) == "8 x 8 x 2 = 128 (2 nodes x 4 devices)"
    assert pickle.loads(pickle.dumps(geometry)) == geometry  # noqa: S301 - our own bytes
    assert sorted([BatchGeometry(1, 4, 1, 1), geometry])[0] is geometry


@settings(deadline=None)
@given(geometries, st.integers(1, 64), st.data())
def test_solve_restores_any_field_that_the_others_determine(geometry, sequence_length, data):
    values = full(geometry, sequence_length)
    device_names = data.draw(
        st.sampled_from(
            [
                ("nodes", "devices_per_node"),
                ("nodes", "data_parallel_size"),
                ("devices_per_node", "data_parallel_size"),
            ]
        )
    )
    global_name = data.draw(st.sampled_from(["global_batch_size", "global_batch_tokens"]))
    roles = [
        device_names,
        ("micro_batch_size",),
        ("gradient_accumulation_steps",),
        (global_name,),
    ]
    missing = data.draw(st.sampled_from([None, *roles]))
    extra = data.draw(st.sets(st.sampled_from(ALL_NAMES)))
    # Without devices, one of nodes or devices_per_node still has to say how they are split.
    split = data.draw(st.sampled_from(["nodes", "devices_per_node"]))
    names = {name for role in roles if role != missing for name in role} | extra | {split}
    given_values = {name: values[name] for name in names}
    assert solve(**given_values, sequence_length=sequence_length) == geometry


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"data_parallel_size": 8}, (1, 8)),
        ({"devices_per_node": 8}, (1, 8)),
        ({"data_parallel_size": 8, "devices_per_node": 4}, (2, 4)),
        ({"global_batch_size": 48}, (1, 8)),
        ({"global_batch_size": 48, "nodes": 2}, (2, 4)),
    ],
)
def test_nodes_are_one_only_where_nothing_determines_them(values, expected):
    geometry = solve(**values, micro_batch_size=3, gradient_accumulation_steps=2)
    assert geometry == BatchGeometry(*expected, 3, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["too few values", "add any 3 of", "given nothing"]),
        ({"nodes": 4}, ["add any 3 of", "data_parallel_size", "nodes=4"]),
        ({"data_parallel_size": 4}, ["add any 2 of micro_batch_size, gradient_acc"]),
        ({"devices_per_node": 4, "micro_batch_size": 2}, ["add any 1 of gradient_acc"]),
        (
            {"nodes": 2, "micro_batch_size": 2, "global_batch_size": 8},
            ["add any 1 of data_parallel_size, gradient_acc"],
        ),
        (
            {"data_parallel_size": 1, "micro_batch_size": 1, "global_batch_tokens": 8},
            ["global_batch_tokens needs sequence_length"],
        ),
    ],
)
def test_too_few_values_are_refused_with_what_to_add(values, words):
    error = refusal(**values)
    assert error.nearest == ()
    assert all(word in str(error) for word in words), error


def test_remainder_is_refused_with_the_neighbours():
    error = refusal(global_batch_size=32, data_parallel_size=3, micro_batch_size=4)
    assert list(map(str, error.nearest)) == [
        "3 x 4 x 3 = 36",
        "3 x 4 x 2 = 24",
        "4 x 4 x 2 = 32",
        "2 x 4 x 4 = 32",
    ]
    assert str(error) == (
        "global_batch_size must be a multiple of data_parallel_size x micro_batch_size"
        " (32 / 12 leaves 8); given data_parallel_size=3, micro_batch_size=4,"
        " global_batch_size=32; nearest that would work: 3 x 4 x 3 = 36, 3 x 4 x 2 = 24,"
        " 4 x 4 x 2 = 32, 2 x 4 x 4 = 32"
    )
    assert isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (
            {"nodes": 2, "devices_per_node": 4, "data_parallel_size": 6},
            "data_parallel_size must equal nodes x devices_per_node (6 is not 8)",
        ),
        (
            {"nodes": 4, "data_parallel_size": 6},
            "data_parallel_size must be a multiple of nodes (6 / 4 leaves 2)",
        ),
        (
            {"data_parallel_size": 2, "global_batch_size": 5},
            "global_batch_size must equal data_parallel_size x micro_batch_size x"
            " gradient_accumulation_steps (5 is not 4)",
        ),
        (
            {"global_batch_tokens": 70, "global_batch_size": 8, "sequence_length": 10},
            "global_batch_size must equal global_batch_tokens / sequence_length (8 is not 7)",
        ),
        (
            {"global_batch_tokens": 75, "sequence_length": 10},
            "global_batch_tokens must be a multiple of sequence_length (75 / 10 leaves 5)",
        ),
    ],
)
def test_contradictions_state_the_rule(values, rule):
    error = refusal(**values, micro_batch_size=2, gradient_accumulation_steps=1)
    assert str(error).startswith(f"{rule}; given ")
    assert all(f"{name}={value}" in str(error) for name, value in values.items())
    assert error.nearest


@pytest.mark.parametrize("name", [*ALL_NAMES, "sequence_length"])
@pytest.mark.parametrize(
    "bad", [0, True, 8.0, 2.5, math.nan, "8", 2**63, pytest.param(10**5000, id="huge")]
)
def test_anything_but_a_count_is_refused(name, bad):
    values = full(BatchGeometry(1, 2, 4, 3), 16) | {"sequence_length": 16}
    error = refusal(**(values | {name: bad}))
    assert str(error).startswith("every value must be an int from 1 to 2**63 - 1; given ")
    assert f"{name}=" in str(error)
    for geometry in error.nearest:
        assert solve(**full(geometry, 16), sequence_length=16) == geometry


def test_a_bad_value_is_answered_with_what_it_may_have_meant():
    error = refusal(global_batch_size=8.0, data_parallel_size=2, micro_batch_size=1)
    assert error.nearest == (BatchGeometry(1, 2, 1, 4),)
    error = refusal(global_batch_size=0, data_parallel_size=2, micro_batch_size=4)
    assert error.nearest == (BatchGeometry(1, 2, 4, 1),)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "2", None])
def test_constructor_refuses_what_solve_refuses(bad):
    with pytest.raises(GeometryError, match="micro_batch_size="):
        BatchGeometry(1, 1, bad, 1)


def test_counts_beyond_63_bits_are_refused():
    with pytest.raises(GeometryError, match=r"global_batch_size must be below 2\*\*63"):
        BatchGeometry(2**20, 2**20, 2**20, 2**3)
    assert BatchGeometry(2**20, 2**20, 2**20, 4).global_batch_size == 2**62


GRID = np.stack(np.meshgrid(*[np.arange(1, 21)] * 4, indexing="ij")).reshape(4, -1)
SEQUENCE_LENGTH = 2


def grid_values():
    n, d, m, a = GRID
    values = (n, d, n * d, m, a, n * d * m * a, n * d * m * a * SEQUENCE_LENGTH)
    return dict(zip(ALL_NAMES, values, strict=True))


GRID_VALUES = grid_values()
small_requests = st.fixed_dictionaries(
    {"data_parallel_size": st.integers(1, 5)},
    optional={
        "nodes": st.integers(1, 4),
        "devices_per_node": st.integers(1, 4),
        "micro_batch_size": st.integers(1, 5),
        "gradient_accumulation_steps": st.integers(1, 5),
        "global_batch_size": st.integers(1, 30),
        "global_batch_tokens": st.integers(1, 60),
    },
).flatmap(
    lambda request: st.sampled_from(
        [request, {k: v for k, v in request.items() if k != "data_parallel_size"}]
    )
)


@settings(max_examples=100, deadline=None)
@given(small_requests)
def test_nearest_are_as_near_as_brute_force_finds(request):
    nearest = ()
    try:
        solved = solve(**request, sequence_length=SEQUENCE_LENGTH)
    except GeometryError as error:
        if "too few values" in str(error):
            return
        nearest = error.nearest
    else:
        values = full(solved, SEQUENCE_LENGTH)
        assert all(values[name] == value for name, value in request.items())
        return

    changed = np.sum([GRID_VALUES[name] != value for name, value in request.items()], axis=0)
    assert changed.min() > 0
    assert 1 <= len(nearest) <= 4
    assert len(set(nearest)) == len(nearest)
    distances = []
    for geometry in nearest:
        values = full(geometry, SEQUENCE_LENGTH)
        assert sum(values[name] != value for name, value in request.items()) <= changed.min()
        distance = sum(abs(math.log(values[name] / request[name])) for name in request)
        distances.append(round(distance, 6))
    assert distances == sorted(distances)
    if changed.min() == 1:  # with more changes the trade between them is a matter of taste
        ratios = [GRID_VALUES[name][changed == 1] / value for name, value in request.items()]
        assert distances[0] <= np.abs(np.log(ratios)).sum(axis=0).min() + 1e-6


@settings(max_examples=50, deadline=None)
@given(
    st.fixed_dictionaries(
        {name: st.integers(1, 2**62) for name in ALL_NAMES[2:4]},
        optional={name: st.integers(1, 2**62) for name in ALL_NAMES[:2] + ALL_NAMES[4:]},
    )
)
def test_huge_values_are_refused_with_valid_neighbours(request):
    try:
        solved = [solve(**request, sequence_length=1024)]
    except GeometryError as error:
        solved = list(error.nearest)
    for geometry in solved:
        values = full(geometry, 1024)
        del values["global_batch_tokens"]
        assert solve(**values) == geometry
        assert geometry.global_batch_size < 2**63


limits = st.none() | st.integers(1, 40)


@settings(deadline=None)
@given(
    total=st.integers(1, 96),
    max_devices=limits,
    sizes=st.none() | st.lists(st.integers(1, 40), max_size=6),
    max_micro=limits,
    max_accumulation=limits,
    nodes=st.integers(1, 4),
)
def test_enumerate_equals_brute_force(
    *, total, max_devices, sizes, max_micro, max_accumulation, nodes
):
    expected = [
        BatchGeometry(nodes, per_node, micro, accumulation)
        for per_node, micro, accumulation in product(range(1, total + 1), repeat=3)
        if nodes * per_node * micro * accumulation == total
        and nodes * per_node <= (max_devices or total)
        and (sizes is None or nodes * per_node in sizes)
        and micro <= (max_micro or total)
        and accumulation <= (max_accumulation or total)
    ]
    geometries = enumerate_geometries(
        total,
        max_data_parallel_size=max_devices,
        data_parallel_sizes=sizes,
        max_micro_batch_size=max_micro,
        max_gradient_accumulation_steps=max_accumulation,
        nodes=nodes,
    )
    assert geometries == expected


@pytest.mark.parametrize(
    "bad", [{"nodes": 0}, {"max_micro_batch_size": 2.0}, {"data_parallel_sizes": [2, 0]}]
)
def test_enumerate_refuses_what_is_no_count(bad):
    with pytest.raises(GeometryError, match=f"every value must be an int .*{next(iter(bad))}="):
        enumerate_geometries(8, **bad)
