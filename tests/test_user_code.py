"""The user's own code: what counts as its source."""

import importlib.machinery
import importlib.util
import sys

import pytest

from batchscape.errors import ConfigError
from batchscape.user_code import named_files, source_hash

RAISES = "raise RuntimeError('this is not to be executed')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, and the only place beside the installed ones."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(here)
    return here


def write(folder, files):
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{source}class Model: ...\n{RAISES}")


def counted(folder, target):
    """Return the files whose content changes the hash of a target."""
    before = source_hash(target)
    names = set()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        file.write_bytes(content + b"# changed\n")
        if source_hash(target) != before:
            names.add(file.relative_to(folder).as_posix())
        file.write_bytes(content)
    assert source_hash(target) == before
    return names


def test_a_module_counts_with_all_that_it_imports(folder):
    write(
        folder,
        {
            "tm_top.py": "import numpy\nimport tm_helper as h\nfrom tm_pack import deep\n",
            "tm_helper.py": "def f():\n    from tm_lazy import x\n",
            "tm_lazy.py": "import tm_top\n",
            "tm_other.py": "",
            "tm_pack/__init__.py": "",
            "tm_pack/deep.py": "from . import near\nfrom .sub.far import x\n",
            "tm_pack/near.py": "",
            "tm_pack/unused.py": "",
            "tm_pack/sub/far.py": "from ..up import *\n",
            "tm_pack/up.py": "",
        },
    )
    expected = {
        "tm_top.py",
        "tm_helper.py",
        "tm_lazy.py",
        "tm_pack/__init__.py",
        "tm_pack/deep.py",
        "tm_pack/near.py",
        "tm_pack/sub/far.py",
        "tm_pack/up.py",
    }
    assert counted(folder, "tm_top.Model") == expected


def test_a_package_counts_whole_and_with_what_it_imports(folder):
    write(
        folder,
        {
            "tp_pack/__init__.py": "",
            "tp_pack/unused.py": "import tp_beside\n",
            "tp_pack/broken.py": "def (:\n",
            "tp_beside.py": "",
            "tp_other.py": "",
        },
    )
    expected = {f"tp_pack/{name}.py" for name in ("__init__", "unused", "broken")}
    assert counted(folder, "tp_pack.unused.Model") == {*expected, "tp_beside.py"}


def test_modules_count_beside_the_target_or_below_the_working_directory(
    folder, tmp_path, monkeypatch
):
    for place in (tmp_path / "library", tmp_path / "elsewhere", folder / "src"):
        monkeypatch.syspath_prepend(str(place))
    write(
        tmp_path,
        {
            "library/tb_top.py": "import tb_beside, tb_far, tb_below\n",
            "library/tb_beside.py": "",
            "elsewhere/tb_far.py": "",
            "here/src/tb_below.py": "",
        },
    )
    expected = {"library/tb_top.py", "library/tb_beside.py", "here/src/tb_below.py"}
    assert counted(tmp_path, "tb_top.Model") == expected


def test_installed_packages_do_not_count(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder / "env" / "site-packages"))
    write(
        folder,
        {
            "ti_top.py": "import ti_installed\n",
            "env/site-packages/ti_installed.py": "import ti_other\n",
            "ti_other.py": "",
        },
    )
    assert counted(folder, "ti_top.Model") == {"ti_top.py"}
    installed = counted(folder, "ti_installed.Model")
    assert installed == {"env/site-packages/ti_installed.py"}


@pytest.mark.usefixtures("folder")
def test_packages_that_an_editable_install_finds(tmp_path, monkeypatch):
    write(tmp_path, {"project/te_pack/__init__.py": "", "project/te_pack/net.py": ""})

    class Finder(importlib.machinery.PathFinder):
        """As setuptools installs one for packages that are not on the path."""

        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            del path, target
            if fullname != "te_pack":
                return None
            folder = tmp_path / "project" / "te_pack"
            return importlib.util.spec_from_file_location(
                fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    expected = {"project/te_pack/__init__.py", "project/te_pack/net.py"}
    assert counted(tmp_path, "te_pack.net.Model") == expected
    assert "te_pack" not in sys.modules


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_found_is_told():
    with pytest.raises(ConfigError, match="there is no module 'tn_nothing'"):
        source_hash("tn_nothing.Model")


@pytest.mark.parametrize(
    "source",
    [
        *(
            "class Model:\n    other = 1\n",
            "def Model():\n    return other\n",
            "Model = other = 1\n",
        ),
        *("from somewhere import it as Model\n", "if 1:\n    for Model in ():\n        pass\n"),
        *("from somewhere import *\n", "globals()['Model'] = 1\n", "def __getattr__(name): ...\n"),
        *("def f():\n    global Model\n    Model = 1\nf()\n", "Model = 'no' syntax\n"),
    ],
)
def test_a_name_that_a_module_may_have_is_not_refused(folder, source):
    (folder / "tq_module.py").write_text(source)
    assert source_hash("tq_module.Model")


def test_a_name_that_its_module_does_not_bind_is_refused_unlaunched(folder):
    source = (
        "import torch\n# a global batch, as exec and vars have it\nclass Model:\n    Mode = 1\n"
    )
    (folder / "tu_module.py").write_text(source + RAISES)
    with pytest.raises(ConfigError) as refused:
        source_hash("tu_module.Modell")
    assert str(refused.value) == (
        "_target_=tu_module.Modell: module tu_module has no 'Modell'; "
        "did you mean Model? Known here: torch, Model"
    )
    for name in ("Mode", "other"):  # an attribute is no name of the module
        with pytest.raises(ConfigError, match=f"has no '{name}'"):
            source_hash(f"tu_module.{name}")


def test_files_are_found_in_arguments_of_any_depth(folder):
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).touch()
    (folder / "folder").mkdir()
    arguments = {"one": "b.txt", "more": [{"two": "a.txt"}, 3, None, "folder", "none.txt", ""]}
    assert list(named_files(arguments)) == ["a.txt", "b.txt"]
