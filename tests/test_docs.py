"""What the documents say is so: links lead somewhere, commands and settings are there."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from batchscape.cli import main
from batchscape.compose import compose
from batchscape.config import RunConfig
from batchscape.config.settings import SETTINGS
from batchscape.cuda_devices import CudaDevice
from batchscape.plan.build import make_plan
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity
from batchscape.record.status import Status
from batchscape.search.stand_ins import stand_ins

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECORD = (DOCS / "record.md").read_text()
PAGES = sorted(ROOT.glob("*.md")) + sorted(DOCS.glob("*.md"))
EXAMPLES = sorted(ROOT.glob("examples/*/README.md"))


def each_page(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def test_columns_and_figures_are_documented_as_they_are():
    """`python docs/record_reference.py` writes them."""
    written = runpy.run_path(str(DOCS / "record_reference.py"))["page"]()
    assert (DOCS / "columns.md").read_text() == written


def test_every_status_is_documented():
    section = RECORD.split("## Statuses")[1].split("## Causes")[0]
    assert all(f"`{status}`" in section for status in Status if status != Status.PRUNED)


def test_the_configuration_is_documented_as_it_is():
    """`python docs/config_reference.py` writes it."""
    written = runpy.run_path(str(DOCS / "config_reference.py"))["page"]()
    assert (DOCS / "configuration.md").read_text() == written


def test_the_claims_are_documented_as_they_are():
    """`python docs/claims_reference.py` writes them."""
    written = runpy.run_path(str(DOCS / "claims_reference.py"))["page"]()
    assert (DOCS / "claims.md").read_text() == written


# Links


@each_page(PAGES)
def test_paths_in_documents_exist(page):
    """A path in backticks that starts with a folder of ours names something that is there."""
    folders = "conf|sweeps|analysis|benchmarks|docs|tests|src|train|record|data|plan|launch|models"
    for path in re.findall(rf"`((?:{folders})/[\w./]*)`", page.read_text()):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src" / "batchscape")), path


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page):
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = set()
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        again = (f"{words}-{n}" for n in range(1, 100))
        headings.add(
            words if words not in headings else next(a for a in again if a not in headings)
        )
    return headings


def problem_of(link, page):
    """Say why a link leads nowhere; a link to the network is looked at, not followed."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        is_whole = parts.scheme == "https" and "." in parts.netloc and " " not in link
        return None if is_whole else "is no https address"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return "is not there"
    if parts.fragment and parts.fragment not in anchors(target):
        return f"has no such heading; there are {sorted(anchors(target))}"
    return None


@each_page(PAGES + EXAMPLES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "`", prose(page)))
    problems = {link: problem_of(link, page) for link in links}
    assert not {link: problem for link, problem in problems.items() if problem}


def test_every_page_and_every_picture_is_shown():
    index = (DOCS / "README.md").read_text()
    assert [p.name for p in DOCS.glob("*.md") if f"({p.name})" not in index] == ["README.md"]
    gallery = (DOCS / "gallery.md").read_text()
    assert [p for p in (DOCS / "images").iterdir() if f"(images/{p.name})" not in gallery] == []


def test_both_readmes_have_the_same_commands_links_and_numbers():
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    for pattern in (r"^(?:make|batchscape|cd|    ) ?[^#\n]*[^#\s]", r"\]\((docs/[^)]*)\)"):
        assert set(re.findall(pattern, english, re.MULTILINE)) == set(
            re.findall(pattern, chinese, re.MULTILINE)
        )
    figures = r"\d+\.\d+|\d+ [^\w\s] \d+"
    assert sorted(re.findall(figures, english)) == sorted(re.findall(figures, chinese))


# Commands

GPUS = tuple(CudaDevice(i, "a GPU", (9, 0), f"GPU-{i}", 80.0) for i in range(8))
BOX = Machine(64, "a CPU", GPUS)
SETTING_VERBS = ("sweep", "run", "plan")
STANDS_FOR = re.compile(r"\b(?:NAME|DIR|FILE|FOLDER)\b|\.\.\.")
"""What a reader replaces."""


class PageCommand(NamedTuple):
    """A command of a page."""

    page: str
    folder: Path
    words: tuple[str, ...]


def commands_on(page):
    """Yield the commands of a page: lines of blocks without a language, and those in a sentence."""
    programs = ("batchscape", "make", "python", "pip", "cd", "source", ".ci/run")
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        folder = ROOT
        joined = block.replace("\\\n", " ").splitlines()
        lines = [line for line in joined if line.strip() and line[0] != "#"]
        if not any(line.split()[0] in programs for line in lines) or "──" in block:
            continue
        for line in lines:
            words = tuple(shlex.split(line, comments=True))
            yield PageCommand(page.name, folder, words)
            if words[0] == "cd":
                folder /= words[1]
    for command in re.findall(
        r"`((?:batchscape|make|python|pip|source|eval)\s[^`]*)`", prose(page)
    ):
        words = tuple(shlex.split(command.split("\\|")[0]))
        if words[1].isidentifier() or words[0] != "batchscape" or "-" in words[1]:
            yield PageCommand(page.name, ROOT, words)


@functools.cache
def commands():
    return tuple(
        command for page in PAGES if page.name != "CHANGELOG.md" for command in commands_on(page)
    )


def takes_settings(words):
    """Whether a command is followed by settings; `recommend` may be, or by a folder."""
    verb, *others = words[1:] or [""]
    return verb in SETTING_VERBS or (verb == "recommend" and "=" in "".join(others[:1]))


def test_every_setting_of_a_command_exists():
    """Without composing them, which takes half a second each."""
    setting_commands = [command for command in commands() if takes_settings(command.words)]
    assert len(setting_commands) > 60
    keys = [f"{setting.key}." for setting in SETTINGS]
    for command in setting_commands:
        words = [word for word in command.words[2:] if "=" in word and "..." not in word]
        options = dict(zip(command.words, command.words[1:], strict=False))
        config_dir = command.folder / options.get("--config-dir", ".")
        for override in OverridesParser.create().parse_overrides(words):
            key = override.get_key_element().lstrip("+~")
            value = override.value()
            if key == "sweeps":
                places = [base / "sweeps" / f"{value}.yaml" for base in (ROOT, config_dir)]
                assert STANDS_FOR.search(str(value)) or any(p.exists() for p in places), command
            elif (ROOT / "conf" / key).is_dir():
                for option in value.list if hasattr(value, "list") else [value]:
                    assert (ROOT / "conf" / key / f"{option}.yaml").exists() or STANDS_FOR.search(
                        " ".join(command.words)
                    ), command
            else:
                assert f"{key}.".startswith((*keys, "hydra.")), command


def test_other_commands_name_what_there_is():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    for _, folder, (program, *rest) in commands():
        if program == "cd":
            assert (folder / rest[0]).is_dir(), rest
        elif program == "python" and rest[0] != "-m":
            assert (ROOT / rest[0]).is_file(), rest
        elif program == "pip" and "[" in rest[-1]:
            names = rest[-1].partition("[")[2].rstrip("]").split(",")
            assert set(names) <= set(extras["optional-dependencies"]), rest
        elif program == "make" and rest[0] == "-C":
            assert (ROOT / rest[1] / "Makefile").is_file(), rest
        elif program == "make":
            assert re.search(rf"^([\w-]+ )*{rest[0]}[: ]", makefile, re.MULTILINE), rest


@pytest.mark.slow
def test_every_other_name_of_a_column_is_documented():
    from batchscape.analysis.targets.columns import ALIASES

    section = (DOCS / "analysis_tables.md").read_text().partition("### Which column is which")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    documented = {name: tuple(re.findall(r"`(\w+)`", others)) for name, others in rows}
    assert documented == {name: others for name, others in ALIASES.items() if others}


@pytest.mark.slow
@each_page([page for page in PAGES if "```python" in page.read_text()])
def test_what_python_imports_is_there(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert [n.name for n in node.names if not hasattr(module, n.name)] == []


@pytest.mark.slow
def test_commands_on_folders_and_files_lack_nothing_but_these(tmp_path, monkeypatch, capsys):
    """Where there are no runs yet each says so of its folder, and complains of nothing else."""
    monkeypatch.chdir(tmp_path)
    verbs = ("report", "view", "recommend", "status", "analyze", "configs", "check-config")
    for command in sorted(
        {other for other in commands() if other.words[1:2] and other.words[1] in verbs}
    ):
        if takes_settings(command.words):
            continue
        arguments = [word for word in command.words[1:] if word != "..."]
        if len(arguments) == 1:
            continue
        code = main(arguments)
        captured = capsys.readouterr()
        assert code == (0 if arguments[0] == "configs" else 2), (command, captured.err)
        assert code == 0 or any(word in captured.err for word in arguments[1:]), (
            command,
            captured.err,
        )
        assert "usage:" not in captured.err, (command, captured.err)


def declared_or_box(grid):
    cluster = RunConfig.from_mapping(grid.cells[0].settings).cluster
    return BOX if cluster.device is None else Machine.of(cluster)


@pytest.mark.slow
def test_every_sweep_that_is_shown_is_planned(capsys):
    """On a box of eight GPUs; how many runs a study has is in its first line, and tested."""

    def prepare(data):
        if data.name == "digits":
            held = round(1797 * data.held_out_pct / 100)
            return DataIdentity(
                data.name, "nowhere", 1797 - held, held, 10, task="class", features=64
            )
        return DataIdentity(data.name, "nowhere", 10**6, 10**4, 256, task="next_token")

    planned = {}
    for command in sorted(commands()):
        line = shlex.join(command.words)
        is_one = len(command.words) > 2 and takes_settings(command.words)
        # Studies as they are, and the commands of claims, are planned by tests of their own.
        is_planned = command.page == "claims.md" or re.fullmatch(r"\S+ \w+ sweeps=\w+", line)
        if is_one and not is_planned and not STANDS_FOR.search(line) and line not in planned:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(command.folder)
                # What a plan does beside composing is its own.
                settings = re.sub(r" --out \S+", "", shlex.join(command.words[2:]))
                grid = compose(shlex.split(settings), "batchscape sweep")
                if grid and grid.intervals:
                    grid = stand_ins(grid, declared_or_box(grid), prepare).cells
                planned[line] = grid and make_plan(grid, declared_or_box(grid), prepare)
                assert grid or "--cfg" in line
    capsys.readouterr()
    assert len(planned) > 20
    (eight,) = (plan for line, plan in planned.items() if plan and "eight_gpus" in line)
    cuts = {str(spec.geometry) for spec in eight.specs}
    assert len(cuts) == 16
    assert {"1 x 4 x 64 = 256", "8 x 32 x 1 = 256"} < cuts
    assert len(eight.specs) == 48
    assert not eight.rejections
