"""Private members of other libraries: each that is used is in one table, with the reason why.

A release of a library may drop or rename them without a word. Here it is seen first which of them
are gone; what a user is told then is `batchscape.libraries.why_missing`'s to say.
"""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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

COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
UNMARKED = [
    (
        f"{COORDINATOR}.assert_ints_same_as_other_ranks",
        "plan/one_rank.py",
        "stage 3 compares numbers of ranks, and a rehearsal has neither numbers nor other ranks",
    ),
    (
        f"{COORDINATOR}.PartitionedParameterCoordinator",
        "engines/deepspeed_setup.py",
        "caches around its methods keep the last model for the life of the process",
    ),
    (
        "deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK",
        "engines/deepspeed_setup.py",
        "as above: a list",
    ),
    (
        "deepspeed.comm.comm.cdb",
        "engines/deepspeed.py",
        "nothing public tells how many bytes of gradients are exchanged",
    ),
    (
        f"{ENGINE}.allreduce_gradients",
        "engines/deepspeed.py",
        "nothing public is called between the last gradient and the exchange",
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.refresh_fp32_params",
        "engines/zero.py",
        "a state is taken back only from files of the library's own",
    ),
]
"""Members of DeepSpeed that are internal, though without an underscore."""
INTERNAL = {path.rpartition(".")[2] for path, _, _ in UNMARKED}


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
        "plan/one_rank.py",
        "a mesh of real numbers is made in the middle of a rehearsal",
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
    *(
        Member(
            f".{path.rpartition('.')[2]}",
            file,
            why,
            "deepspeed",
            owner=lambda path=path: resolved(path.rpartition(".")[0]),
            marks=pytest.mark.systems,
        )
        for path, file, why in UNMARKED
    ),
]


LIBRARIES = {*importlib.metadata.packages_distributions()} - OWN
LIBRARIES |= {member.path.partition(".")[0] for member in TABLE} - {""}
DOCUMENTED = {"_replace", "_asdict", "_make", "_fields", "_exit", "__from_arrow__"}
"""Of named tuples, of `os`, and of pandas' types."""
OF_MODULES = {name for name in vars(nn.Module()) if name.startswith("_")}
"""What every `nn.Module` keeps, never one of ours by the same name."""
KINDS = (
    *vars(types).values(),
    *vars(builtins).values(),
    AbstractContextManager,
    Annotated[int, ""],
)
OF_PYTHON = {name for kind in KINDS for name in dir(kind)} | {"__all__", "__slots__"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "_replace"}
STANDARD = {"__file__", "__name__", "__version__", "__init__", "__dict__", "__doc__"}


def is_private(name: str) -> bool:
    return name in INTERNAL or (name.startswith("_") and name not in STANDARD)


class Uses(ast.NodeVisitor):
    """Private members of other libraries that a module uses, as `Member.path` has them.

    Parts of such paths too, where a path leads on.
    """

    def __init__(self, code: str) -> None:
        self.found: set[str] = set()
        self._imported: dict[str, str] = {}
        self._own: set[str] = set()
        tree = ast.parse(code)
        for node in ast.walk(tree):
            self._learn(node)
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        """Take note of what names stand for."""
        if isinstance(node, ast.Import):
            for each in node.names:
                whole = each.name if each.asname else each.name.partition(".")[0]
                self._imported[each.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                self._imported[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self._own.add(node.name)
        elif isinstance(node, ast.Attribute) and of_self(node.value):
            self._own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._own.add(node.target.id)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            self._named(each.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for each in node.names:
            self._named(f"{node.module}.{each.name}")

    def visit_Constant(self, node: ast.Constant) -> None:
        """What is imported by its name."""
        if isinstance(node.value, str) and re.fullmatch(r"\w+(\.\w+)+", node.value):
            self._named(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._member(node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            for owner, name in pairwise(node.args):
                if isinstance(name, ast.Constant) and is_private(str(name.value)):
                    self._member(owner, str(name.value))
        self.generic_visit(node)

    def _named(self, path: str) -> None:
        root, *rest = path.split(".")
        if root in LIBRARIES and any(map(is_private, rest)):
            self.found.add(path)

    def _member(self, owner: ast.AST, name: str) -> None:
        path = self._path(owner)
        parts = [*path.split("."), name]
        if parts[0] in LIBRARIES:
            private = [i for i, part in enumerate(parts) if is_private(part)]
            self.found |= {".".join(parts[: i + 1]) for i in private[-1:]}
        elif not parts[0] and is_private(name) and not of_self(owner):
            is_known = name in self._own - OF_MODULES or name in DOCUMENTED | OF_PYTHON
            self.found |= set() if is_known else {f".{name}"}

    def _path(self, node: ast.AST) -> str:
        """Return the full name of an expression, which begins with a dot where it is not known."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, "")
        return f"{self._path(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def of_self(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in {"self", "cls"}) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def sources() -> dict[str, str]:
    """Return the code of every module, by its path."""
    found = {}
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return found


def uses(codes: dict[str, str]) -> set[tuple[str, str]]:
    """Return the files and what they use."""
    return {(file, path) for file, code in codes.items() for path in Uses(code).found}


def differences(used: set[tuple[str, str]], table: list[Member]) -> list[str]:
    """Say which uses are in no table, and which entries nobody uses."""
    listed = {
        (os.path.normpath(f"src/batchscape/{file}"), m.path)
        for m in table
        for file in m.files.split()
    }
    unlisted = [
        f"{file} uses {path}, which the table does not have: is there a public way?"
        for file, path in sorted(used)
        if not any(file == f and f"{p}.".startswith(f"{path}.") for f, p in listed)
    ]
    return unlisted + [
        f"the table has {path} of {file}, which does not use it"
        for file, path in sorted(listed - used)
    ]


@pytest.fixture(scope="module")
def used() -> set[tuple[str, str]]:
    return uses(sources())


def test_what_is_used_is_in_the_table_and_the_other_way_round(used: set[tuple[str, str]]) -> None:
    assert differences(used, TABLE) == []
    assert {member.library for member in TABLE} == {*TESTED_VERSIONS}


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("import torch\ntorch._C._nn._parse_to()", "torch._C._nn._parse_to"),
        ("from torch._guards import detect_fake_mode", "torch._guards.detect_fake_mode"),
        ("import torch.distributed as dist\ndist._get()", "torch.distributed._get"),
        ("def f(module): return module._buffers", "._buffers"),
        ("class A:\n  def f(self, m): self._buffers = m._buffers", "._buffers"),
        ("import torch\ngetattr(torch.cuda, '_lazy', None)", "torch.cuda._lazy"),
        ("import importlib\nimportlib.import_module('torch._inductor')", "torch._inductor"),
        ("def f(trial): trial._storage.close()", "._storage"),
        ("def f(config): return config.__pydantic_fields__", ".__pydantic_fields__"),
        ("def f(library): return library.zero.ops.cdb", ".cdb"),
    ],
)
def test_a_private_member_that_is_planted_is_found(
    code: str, path: str, used: set[tuple[str, str]]
) -> None:
    planted = uses({"src/batchscape/planted.py": code})
    (said,) = (line for line in differences(used | planted, TABLE) if f"uses {path}," in line)
    assert said.startswith("src/batchscape/planted.py")


def test_an_entry_that_nobody_uses_is_found(used: set[tuple[str, str]]) -> None:
    entry = Member("torch._C._nn", "plan/one_rank.py", "")
    (said,) = differences(used, [*TABLE, entry])
    assert "torch._C._nn of src/batchscape/plan/one_rank.py" in said


@pytest.mark.parametrize(
    "member",
    [pytest.param(member, id=member.path, marks=member.marks) for member in TABLE],
)
def test_the_library_still_has_it(member: Member) -> None:
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


@pytest.mark.systems
def test_deepspeed_keeps_models_in_caches_around_methods() -> None:
    """As `engines/deepspeed_setup.py` empties them; others would be left without a word."""
    methods = vars(resolved(f"{COORDINATOR}.PartitionedParameterCoordinator")).values()
    cells = (cell for method in methods for cell in getattr(method, "__closure__", None) or ())
    assert any(hasattr(cell.cell_contents, "cache_clear") for cell in cells)


def resolved(path: str) -> Any:
    """Import as much of a path as is a module, and look the rest up in it."""
    module, *rest = path.split(".")
    found = importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        found = getattr(found, name, None) or importlib.import_module(module)
    return found


GONE = {
    "import": ("torch.utils._python_dispatch", "_disable_current_modes", "engine=ddp"),
    "attribute": (
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "_chunk_with_empty",
        "engine=fsdp",
    ),
}


# Each plan is of a process of its own, in which torch is imported already.
WITHOUT_A_MEMBER = """
import importlib, json, os, sys, torch._dynamo, torch.distributed.fsdp
for how, (module, name, engine) in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        delattr(importlib.import_module(module), name)
        from batchscape.cli import main
        with open(how, "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = main(["plan", *sys.argv[2:], engine])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, open(how).read()
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What plans without a member print, in a file each."""
    folder = tmp_path_factory.mktemp("plans")
    settings = "data=digits model=mlp batch.data_parallel_size=2 batch.micro_batch_size=4"
    command = [sys.executable, "-c", WITHOUT_A_MEMBER, json.dumps(GONE), *settings.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", GONE)
def test_a_plan_without_a_member_says_which_version_has_it(how: str, plans: Path) -> None:
    module, name, _ = GONE[how]
    said = " ".join((plans / how).read_text().split())
    assert "Traceback" not in said
    assert f"has no {module}.{name}" in said
    assert f"pip install 'torch=={TESTED_VERSIONS['torch']}.*'" in said


@pytest.mark.parametrize(("module", "library"), [("torch", "torch"), ("hydra", "hydra-core")])
def test_what_is_missing_is_told_by_the_name_that_pip_knows(
    module: str, library: str, tmp_path: Path
) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"import {module}\n{module}.not_there")
    spec = importlib.util.spec_from_file_location("batchscape.planted", planted)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(AttributeError) as gone:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    said = why_missing(gone.value)
    assert said is not None
    assert f"pip install '{library}=={TESTED_VERSIONS[library]}.*'" in said
