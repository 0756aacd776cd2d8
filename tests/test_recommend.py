"""`batchscape recommend` as a shell sees it: help, and errors with the rule and exit code 2."""

import pytest

from batchscape.cli import main


def test_help_names_every_option(capsys):
    assert main(["recommend", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--devices", "--memory-gib", "--deadline", "--target", "--ramp", "--json"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--deadline", "3x"], "90s, 30m, 2h or 1h30m"),
        (["--devices", "0"], "devices must be at least 1"),
        (["--memory-gib", "nan"], "memory_gib must be above zero"),
        ([], "holds no runs"),
        (["--ramp"], "holds no runs"),
        (["--ramp", "--devices", "2"], "takes no other option but --json"),
    ],
)
def test_bad_input_is_answered_with_the_rule(arguments, rule, tmp_path, capsys):
    assert main(["recommend", str(tmp_path), *arguments]) == 2
    assert rule in capsys.readouterr().err
