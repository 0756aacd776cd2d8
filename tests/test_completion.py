"""Completion, by keys that are typed into real shells."""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from omegaconf import OmegaConf

import batchscape.conf
from batchscape.cli import _VERB_HELP, _VERBS, _help_of, main
from batchscape.completion import options_of

CONF = Path(batchscape.conf.__file__).parent
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
PREPARE = {"bash": "bind 'set bell-style none'", "zsh": "autoload -Uz compinit; compinit -u -D"}
TYPED = {
    "batchsc\t pl\tsweeps=fixed_g\t": ["batchscape", "plan", "sweeps=fixed_global_batch"],
    "batchscape sweep optimizer=mu\tlauncher.conc\t4": [
        "batchscape",
        "sweep",
        "optimizer=muon",
        "launcher.concurrent_runs=4",
    ],
    "batchscape plan model=mlp,gpt_mic\t": ["batchscape", "plan", "model=mlp,gpt_micro"],
    "batchscape plan --config-di\town sweeps=mi\t": [
        "batchscape",
        "plan",
        "--config-dir",
        "own",
        "sweeps=mine",
    ],
    "batchscape check-c\t--de\t4": ["batchscape", "check-config", "--devices", "4"],
    "batchscape analyze table.csv --form tw\t": [
        "batchscape",
        "analyze",
        "table.csv",
        "--form",
        "two_term",
    ],
    # Files, where files are meant.
    "batchscape report outp\t": ["batchscape", "report", "outputs"],
    "batchscape status fixed_g\t": ["batchscape", "status", "fixed_g"],
}


def after_keys(shell: str, lines: Sequence[str], folder: Path) -> list[list[str]]:
    """Type lines into a shell, and have it print the words that then stand on each of them."""
    program = [sys.executable, "-m", "batchscape", "completion", shell]
    script = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    (folder / "script").write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C"}
    # To the begin of the line: a command that prints its words; to its end: into which file.
    typed = [f"{line}\x01printf '%s\\n' \x05 > {n}.words\n" for n, line in enumerate(lines)]
    keys = f"{PREPARE[shell]}; . ./script\n{''.join(typed)}exit\n"
    ours, its = pty.openpty()
    with subprocess.Popen(
        START[shell],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(its)
        try:
            os.write(ours, keys.encode())
            # A terminal that nobody reads stops who writes to it.
            seen = b""
            with suppress(OSError):
                while part := os.read(ours, 4096):
                    seen += part
        finally:
            process.kill()
            os.close(ours)
    files = [folder / f"{n}.words" for n, _ in enumerate(lines)]
    assert all(file.exists() for file in files), seen.decode(errors="replace")
    return [file.read_text().splitlines() for file in files]


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.slow)])
def test_what_is_typed_is_completed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        reason = f"not installed: {shell}"
        assert "BATCHSCAPE_REQUIRE_TOOLS" not in os.environ, reason
        pytest.skip(reason)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "own" / "sweeps").mkdir(parents=True)
    (tmp_path / "own" / "sweeps" / "mine.yaml").write_text("seed: 1\n")
    found = after_keys(shell, list(TYPED), tmp_path)
    # Zsh takes the slash behind a folder away again.
    found = [[word.rstrip("/") for word in words] for words in found]
    assert dict(zip(TYPED, found, strict=True)) == TYPED


def parser_of(verb: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return what a verb parses its arguments with."""
    made = []

    def caught(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        made.append(parser)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", caught)
    with pytest.raises(InterruptedError):
        _VERBS[verb]([])
    monkeypatch.undo()
    (parser,) = made
    return parser


@pytest.mark.parametrize("verb", sorted(_VERBS.keys() - _VERB_HELP.keys()))
def test_every_option_and_value_is_offered(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = parser_of(verb, monkeypatch)._option_string_actions
    expected = {
        name: tuple(map(str, action.choices or ()))
        for name, action in actions.items()
        if name.startswith("--")
    }
    assert options_of(_help_of(verb)) == expected


def offered(line: str, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    assert main(["completion", "zsh", "--line", line, *more]) == 0
    return capsys.readouterr().out.splitlines()


def test_settings_are_those_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {path.parent.name for path in CONF.glob("*/*.yaml")}
    top = set(OmegaConf.load(CONF / "config.yaml")) - {"defaults", "hydra"}
    expected = {*(f"{g}=" for g in groups), *(f"{g}." for g in groups), *(f"{t}=" for t in top)}
    assert set(offered("batchscape plan ", capsys)) == {*expected, "sweeps="}
    options = [f"optimizer={path.stem} " for path in (CONF / "optimizer").glob("*.yaml")]
    assert offered("batchscape run optimizer=", capsys) == sorted(options)
    muon = OmegaConf.load(CONF / "optimizer" / "muon.yaml")
    keys = [f"optimizer.{key}=" for key in muon if key != "name"]
    assert offered("batchscape run optimizer=muon optimizer.", capsys) == sorted(map(str, keys))
    for nothing in ("batchscape plan nonsense.", "batchscape nonsense mod", "other 'open mod"):
        assert offered(nothing, capsys) == []


def test_a_shell_that_splits_words_is_given_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    line = "batchscape plan sweeps=musev"
    assert offered(line, capsys) == ["sweeps=musev_224 "]
    assert offered(line, capsys, "--breaks", " =:") == ["musev_224 "]


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom batchscape.cli import main\n"
        "main(['completion', 'bash', '--line', 'batchscape plan model=gpt'])\n"
        "main(['completion', 'bash', '--line', 'batchscape analyze --'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "model=gpt_nano" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "batchscape.completion" in loaded
    assert not loaded & {"torch", "pandas", "wandb", "hydra", "pydantic", "numpy", "rich"}
