"""`batchscape probe`: real trainings under a real limit of memory."""

import sys

import pytest

from batchscape.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="holds processes to a limit")


@pytest.mark.slow
def test_all_fit_or_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ("data.sequence_length=32", "batch.global_batch_size=4")
    assert main(["probe", *short, "device.memory_limit_gib=2"]) == 0
    assert "all fit; the largest is 4" in capsys.readouterr().out
    assert main(["probe", *short, "device.memory_limit_gib=0.0001"]) == 0
    assert "not even 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "give a device.memory_limit_gib"),
        (("seed=0,1", "device.memory_limit_gib=1"), "one combination of settings; given 2"),
        (
            ("batch.data_parallel_size=3", "device.memory_limit_gib=1"),
            "global_batch_size",
        ),
    ],
)
def test_refusals(settings, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *settings]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
