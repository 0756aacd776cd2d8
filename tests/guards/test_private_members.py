"""Private members of other libraries: each that is used is in one table, with the reason why.

A release of a library may drop or rename them without a word. Here it is seen first which of them
are gone; what a user is told then is `batchscape.libraries.why_missing`'s to say.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from batchscape.libraries import TESTED_VERSIONS, why_missing

ROOT = Path(__file__).parents[2]
PLACES = ("src/batchscape", "src/hydra_plugins", "analysis")
OWN = {"batchscape", "hydra_plugins"}


class Member(NamedTuple):
    """A private member of another library that we use."""

    path: str
    """Where it is imported from; begins with a dot where only an object has it."""
    files: str
    """Those that use it, from `src/batchscape` on."""
    why: str
    """Why no public name will do."""
    library: str = "torch"
    owner: Callable[[], Any] | None = None
    """Makes an object that has it."""
    marks: Any = ()
    """Of the tier that has the library, or a build of it that has the member."""


FAKE = "torch._subclasses.fake_tensor"
MODES = "torch.utils._python_dispatch"
NAMED_IN_DOCS = "torch's own pages import it from here; there is no other place"
OPERATOR = "an operator that Python code does not call, and that must be told from others"

TABLE = [
    Member(
        f"{FAKE}.FakeTensorMode",
        "measure/flops.py plan/memory_trace.py",
        NAMED_IN_DOCS,
    ),
    Member(f"{FAKE}.FakeTensor", "plan/memory_trace.py", NAMED_IN_DOCS),
    Member(
        f"{FAKE}.in_kernel_invocation_manager",
        "plan/memory_trace.py",
        "half of a training's operators are views; the mode's own way to one takes far longer",
    ),
    Member(
        f"{FAKE}.unset_fake_temporarily",
        "plan/memory_trace.py plan/one_rank.py",
        "a convolution is measured, and a mesh is made, in the middle of a rehearsal",
    ),
    Member(
        f"{MODES}.TorchDispatchMode",
        "measure/flops.py plan/memory_trace.py train/examination.py",
        NAMED_IN_DOCS,
    ),
    Member(
        f"{MODES}._disable_current_modes",
        "plan/one_rank.py",
        "what distributed tensors compute to know a shape must not be counted",
    ),
    Member(
        "torch.distributed.tensor._sharding_prop.ShardingPropagator."
        "_propagate_tensor_meta_non_cached",
        "plan/one_rank.py",
        "as above: nothing public is called around it",
    ),
    Member(
        "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty",
        "plan/one_rank.py",
        "of 1,024 ranks FSDP makes as many empty tensors for each parameter: 17 s, or 1 s without",
    ),
    Member("torch.ops.aten._local_scalar_dense", "plan/memory_trace.py", OPERATOR),
    Member("torch.ops.aten._safe_softmax", "plan/memory_trace.py", OPERATOR),
    Member("torch.ops.c10d._allgather_base_", "plan/memory_trace.py", OPERATOR),
    Member("torch.ops.c10d._reduce_scatter_base_", "plan/memory_trace.py", OPERATOR),
    Member(
        "._schema",
        "measure/flops.py",
        "nothing else tells whether an operator writes into what it is given",
        owner=lambda: torch.ops.aten.mm.default,
    ),
    Member(
        "._set_sequence_nr",
        "engines/precision.py",
        "the order of a backward has no public door",
        owner=lambda: (torch.ones(1, requires_grad=True) * 2).grad_fn,
    ),
    Member(
        "._is_in_bad_fork",
        "launch/forkserver.py",
        "`is_initialized` does not tell that the driver was asked for devices",
        owner=lambda: torch.cuda,
    ),
    Member(
        "torch._C",
        "measure/memory_cpu.py measure/memory_cuda.py",
        "its file leads to a flag of the allocator that has no door in Python",
    ),
    Member(
        "torch._C._cuda_clearCublasWorkspaces",
        "measure/memory_cuda.py",
        "cuBLAS's workspaces have no public door; without it they are not told apart",
        owner=lambda: torch._C,
        marks=pytest.mark.gpu,
    ),
    Member(
        "torch._dynamo",
        "launch/forkserver.py measure/memory_limit.py",
        "imported ahead: the first optimizer of a process does it",
    ),
    Member(
        "torch._dynamo",
        "train/worker.py",
        "`torch.compiler.config` is public, and torch 2.9 has it without these limits",
    ),
    Member(
        "torch._dynamo.exc.FailOnRecompileLimitHit",
        "train/worker.py",
        "the setting that raises it is public, what it raises is not",
    ),
    Member(
        "._shutdown_workers",
        "train/loader.py",
        "the iterator of a `DataLoader` cannot be closed, and may live on in a traceback",
        owner=lambda: iter(DataLoader([0, 1], num_workers=1)),
    ),
    *(
        Member(
            f"accelerate.state.{kind}._reset_state",
            "engines/accelerate.py",
            "accelerate's states are shared by the whole process, and nothing public forgets them",
            "accelerate",
        )
        for kind in ("AcceleratorState", "GradientState")
    ),
    Member(
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "../hydra_plugins/batchscape_plugins/grid.py",
        "the value that Hydra's own setting of a launcher has where nobody has set it",
        "hydra-core",
    ),
    Member(
        "deepspeed.ops.__compatible_ops__",
        "engines/deepspeed_setup.py",
        "or a kernel is compiled for a minute that nothing uses",
        "deepspeed",
        marks=pytest.mark.systems,
    ),
]


LIBRARIES = {*importlib.metadata.packages_distributions()} - OWN
DOCUMENTED = {"_replace", "_asdict", "_make", "_fields", "_exit"}
"""Of named tuples, and of `os`."""
OF_MODULES = {name for name in vars(nn.Module()) if name.startswith("_")}
"""What every `nn.Module` keeps, never one of ours by the same name."""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "_replace"}


def private_in(path):
    return {name for name in path.split(".") if re.match("_(?!_)", name)} - DOCUMENTED


def uses_of(code):
    """Names of private members that a module uses, but of its own."""
    tree, own, found = ast.parse(code), set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Attribute(value=value, attr=name) if of_self(value):
                own.add(name)
            case ast.Attribute(attr=name):
                found |= private_in(name)
            case ast.Import(names=names):
                found |= {name for each in names for name in private_in(each.name)}
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] not in OWN:
                paths = [module, *(each.name for each in names)]
                found |= {name for path in paths for name in private_in(path)}
            case ast.Call(func=ast.Name(id=called), args=args) if called in BY_NAME:
                constants = [str(each.value) for each in args if isinstance(each, ast.Constant)]
                found |= {name for text in constants for name in private_in(text)}
            case ast.Constant(value=str(text)) if text.split(".")[0] in LIBRARIES:
                found |= private_in(text)
    return found - (own - OF_MODULES)


def of_self(node):
    return ast.unparse(node) in {"self", "cls", "super()"}


def sources():
    """Return the code of every module, by its path."""
    paths = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if not any(parent.is_symlink() for parent in path.parents)
    }


def uses(codes):
    """Return the files and what they use, but of each other."""
    functions = {name for code in codes.values() for name in re.findall(r"def (_\w+)", code)}
    return {(file, name) for file, code in codes.items() for name in uses_of(code) - functions}


def differences(used, table):
    """Say which uses are in no table, and which entries nobody uses."""
    listed = {
        (os.path.normpath(f"src/batchscape/{file}"), name)
        for member in table
        for file in member.files.split()
        for name in private_in(member.path)
    }
    unlisted = [
        f"{file} uses {name}, which the table does not have: is there a public way?"
        for file, name in sorted(used - listed)
    ]
    return unlisted + [
        f"the table has {name} of {file}, which does not use it"
        for file, name in sorted(listed - used)
    ]


@pytest.fixture(scope="module")
def used():
    return uses(sources())


def test_what_is_used_is_in_the_table_and_the_other_way_round(used):
    assert differences(used, TABLE) == []
    assert {member.library for member in TABLE} == {*TESTED_VERSIONS}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\ntorch._C._nn._parse_to()", "_parse_to"),
        ("from torch._guards import detect_fake_mode", "_guards"),
        ("import torch._lobpcg", "_lobpcg"),
        ("class A:\n  def f(self, m): self._buffers = m._buffers", "_buffers"),
        ("import torch\ngetattr(torch.cuda, '_lazy', None)", "_lazy"),
        ("import importlib\nimportlib.import_module('torch._inductor')", "_inductor"),
        ("def f(trial): trial._storage.close()", "_storage"),
    ],
)
def test_a_private_member_that_is_planted_is_found(code, name, used):
    planted = uses({"src/batchscape/planted.py": code})
    said = differences(used | planted, TABLE)
    assert any(line.startswith(f"src/batchscape/planted.py uses {name},") for line in said)


def test_an_entry_that_nobody_uses_is_found(used):
    entry = Member("torch._C._nn", "plan/one_rank.py", "")
    assert "the table has _nn of src/batchscape/plan/one_rank.py" in str(
        differences(used, [*TABLE, entry])
    )


@pytest.mark.parametrize(
    "member",
    [pytest.param(member, id=member.path, marks=member.marks) for member in TABLE],
)
def test_the_library_still_has_it(member):
    installed = importlib.metadata.version(member.library)
    owner, _, name = member.path.rpartition(".")
    found = resolved(owner) if member.owner is None else member.owner()
    has_it = hasattr(found, name)
    if name == "_shutdown_workers" and has_it:
        found._shutdown_workers()
    assert has_it, (
        f"{member.library} {installed} has no {member.path}, which "
        f"{TESTED_VERSIONS[member.library]} has and which {member.files} need: {member.why}"
    )


def resolved(path):
    """Import as much of a path as is a module, and look the rest up in it."""
    module, *rest = path.split(".")
    found = importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        found = getattr(found, name, None) or importlib.import_module(module)
    return found


@pytest.mark.parametrize(("module", "library"), [("torch", "torch"), ("hydra", "hydra-core")])
def test_what_is_missing_is_told_by_the_name_that_pip_knows(module, library, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(f"import {module}\n{module}.not_there")
    spec = importlib.util.spec_from_file_location("batchscape.planted", planted)
    with pytest.raises(AttributeError) as gone:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    said = why_missing(gone.value)
    assert said is not None
    assert f"pip install '{library}=={TESTED_VERSIONS[library]}.*'" in said
