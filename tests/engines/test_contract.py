"""Every engine keeps the contract; engines that break it in one respect are found out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchscape.models.build import build_model

sys.path.insert(0, str(Path(__file__).parent))
import contract
from contract import CASES, GEOMETRIES, WITNESS, overrides

sys.path.pop(0)

BUSY = (2, 4, 4)
"""The geometry in which most can go wrong."""
DDP = CASES[0]


ALONE = {"fsdp", "deepspeed-3"}
"""Cut the model, on a rank that has nobody to exchange with; of the others see test_wrapped.py."""


def geometries():
    """Every engine where most can go wrong, and DDP, which the others are held against, in all."""
    return [
        pytest.param(case, geometry, id=f"{case.label}-{geometry}", marks=case.marks)
        for case in CASES
        for geometry in GEOMETRIES
        if case is DDP or geometry == BUSY or (geometry == (1, 8, 4) and case.label in ALONE)
    ]


def cases():
    return [pytest.param(case, id=case.label, marks=case.marks) for case in CASES]


@pytest.fixture(scope="module")
def runs(trainer, tmp_path_factory):
    """Train each run once: (spec, folder) by engine, geometry and other settings."""
    done = {}

    def train(case, geometry, attempt=0, root=None, **more):
        environment = {key: more.pop(key) for key in list(more) if key.isupper()}
        key = repr((case.label, case.precision, geometry, environment, more))
        if root is not None or key not in done:
            spec = trainer.make_spec(geometry, **overrides(case, **more))
            where = root or tmp_path_factory.mktemp("contract")
            folder = trainer.start(spec, where, attempt=attempt, entry=WITNESS, **environment)
            trainer.wait(spec)
            if root is not None:
                return spec, folder
            done[key] = spec, folder
        return done[key]

    return train


@pytest.fixture(scope="module")
def reference(runs, trainer, tmp_path_factory):
    """Train by DDP in the precision of an engine; return the curve and what it may differ by."""
    from dataclasses import replace

    from batchscape.record.tables import read_table

    granted = {}

    def follow(case, geometry, **more):
        plain = replace(DDP, precision=case.precision)
        table = read_table(runs(plain, geometry, **more)[1], "steps")
        if case.precision == "float64":
            return table, contract.exact()
        key = repr(more)
        if key not in granted:
            one = read_table(runs(plain, (1, 32, 1), **more)[1], "steps")
            orders = []
            for seed in (1, 2):
                spec = trainer.make_spec((1, 32, 1), **overrides(plain, **more))
                folder = trainer.train(
                    spec,
                    tmp_path_factory.mktemp("orders"),
                    entry="faulty_workers:permuted",
                    PERMUTATION=str(seed),
                )
                orders.append(contract.relative(read_table(folder, "steps"), one))
            granted[key] = contract.tolerance_of(orders)
        return table, granted[key]

    return follow


@pytest.fixture(scope="module")
def parameter_bytes(trainer):
    def count(case):
        spec = trainer.make_spec(**overrides(case))
        module = build_model(spec.config, spec.data, spec.precision)
        return sum(p.nbytes for p in module.parameters())

    return count


def table_of(folder):
    from batchscape.record.tables import read_table

    contract.check_completed(folder)
    return read_table(folder, "steps")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "geometry"), geometries())
def test_geometry_exchange_and_curve(runs, reference, parameter_bytes, case, geometry):
    """As declared, as reported, as exchanged; and, over uneven batches, DDP's curve."""
    spec, folder = runs(case, geometry)
    table = table_of(folder)
    contract.check_geometry(spec, folder)
    contract.check_start(spec, folder)
    contract.check_exchange(spec, folder, parameter_bytes(case))
    contract.check_curve(table, *reference(case, geometry))
    # DDP itself is held against one rank with one micro-batch.
    contract.check_curve(table, *reference(case, (1, 32, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases())
def test_clipping_sees_the_whole_gradient(runs, reference, case):
    _, folder = runs(case, BUSY, **contract.CLIPPED)
    contract.check_clipped(table_of(folder), *reference(case, (1, 32, 1), **contract.CLIPPED))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases())
def test_a_stopped_run_goes_on(runs, case, tmp_path):
    """On the same ranks, as if it had not been stopped, bit for bit."""
    undisturbed = table_of(runs(case, BUSY)[1])
    contract.check_resumed(resumed(runs, case, tmp_path), undisturbed, 0 * contract.exact())


def resumed(runs, case, root, **environment):
    _, folder = runs(case, BUSY, root=root, STOP_AFTER="3", **environment)
    assert list(folder.checkpoints.glob("step-000000003-*.pt")), folder.log.read_text()
    _, folder = runs(case, BUSY, root=root, attempt=1, **environment)
    return table_of(folder)


@pytest.mark.slow
def test_uneven_batches_are_uneven(runs):
    """Else the curves would say nothing about the weighting."""
    tokens = table_of(runs(DDP, BUSY)[1])["tokens"].diff().dropna()
    assert tokens.nunique() > 3


FSDP = next(case for case in CASES if case.label == "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fault", "reason"),
    [
        pytest.param(
            DDP, "alone", "data_parallel_size 1 instead of 2", id="another number of ranks"
        ),
        pytest.param(
            FSDP,
            "undeclared_exchange",
            "gradient bytes in an optimizer step of 4 micro-steps, and declares",
            id="exchanges more than declared",
        ),
    ],
)
def test_a_run_ends_that_breaks_its_word(runs, outcome, tmp_path, case, fault, reason):
    """Before the first step, or in it, on every rank."""
    _, folder = runs(case, BUSY, root=tmp_path, FAULT=fault)
    for rank in range(2):
        ended = outcome(folder, rank)
        assert ended["status"] == "failed"
        assert reason in ended["reason"]
        assert ended["optimizer_step"] == 0
    with pytest.raises(AssertionError, match=reason):
        contract.check_completed(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fault", "message"),
    [
        pytest.param(FSDP, "hidden_exchange", "exchanged otherwise", id="hidden exchange"),
        pytest.param(DDP, "alone_and_lying", "not every gradient is", id="hidden lone ranks"),
    ],
)
def test_an_exchange_that_is_hidden_is_found_out(
    runs, parameter_bytes, tmp_path, case, fault, message
):
    spec, folder = runs(case, BUSY, root=tmp_path, FAULT=fault)
    contract.check_completed(folder)
    with pytest.raises(AssertionError, match=message):
        contract.check_exchange(spec, folder, parameter_bytes(case))


@pytest.mark.slow
def test_another_gradient_is_found_out(runs, reference, tmp_path):
    _, folder = runs(DDP, BUSY, root=tmp_path, FAULT="mean_of_means", PARTS="8")
    table = table_of(folder)
    with pytest.raises(AssertionError, match="from the reference's"):
        contract.check_curve(table, *reference(DDP, BUSY))


@pytest.mark.slow
def test_clipping_of_parts_is_found_out(runs, reference, tmp_path):
    _, folder = runs(FSDP, BUSY, root=tmp_path, FAULT="clips_its_part", **contract.CLIPPED)
    table = table_of(folder)
    with pytest.raises(AssertionError, match="from the reference's"):
        contract.check_clipped(table, *reference(FSDP, BUSY, **contract.CLIPPED))


@pytest.mark.slow
def test_a_state_that_is_not_whole_is_found_out(runs, tmp_path):
    undisturbed = table_of(runs(FSDP, BUSY)[1])
    table = resumed(runs, FSDP, tmp_path, FAULT="forgets_moments")
    with pytest.raises(AssertionError, match="from the reference's"):
        contract.check_resumed(table, undisturbed, contract.exact())
