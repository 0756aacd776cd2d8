"""Arguments of a script of the user's own, and what a flag says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscape.cli import main
from batchscape.errors import ConfigError
from batchscape.interop.check import check_configs

OWN = "torchrun --nproc_per_node 2 train.py --batch-size 4 --grad-accum=8"
MICRO, ACCUMULATION = "batch-size=micro_batch_size", "grad_accum=gradient_accumulation_steps"


def test_own_arguments_stand_for_what_the_user_says(capsys) -> None:
    assert main(["check-config", "--", *OWN.split()]) == 0
    assert "another argument of the script does: --flag NAME=micro_batch_size" in " ".join(
        capsys.readouterr().out.split()
    )
    flags = ["--flag", MICRO, f"--flag=--{ACCUMULATION}"]
    assert main(["check-config", *flags, "--", *OWN.split()]) == 0
    assert "= 2 x 4 x 8 = 64" in " ".join(capsys.readouterr().out.split())
    dashed = ["--flag", MICRO, "--flag", f"--{ACCUMULATION}", "--", *OWN.split()]
    assert main(["check-config", *dashed]) == 0
    assert "= 2 x 4 x 8 = 64" in " ".join(capsys.readouterr().out.split())
    wrong = ["--flag", "total=global_batch_size", "--", *OWN.split(), "--total", "32"]
    assert main(["check-config", *flags, *wrong]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "total 32, " in told
    assert "(32 is not 64)" in told
    assert "batch_size 4" in told, "the user's own word"


ACC = "acc=gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("command", "flags", "parts"),
    [
        ("python t.py -b 4 --acc 2", ("b=micro_batch_size", ACC), (4, 2)),
        ("python t.py -b=4 --acc=2", ("-b=micro_batch_size", ACC), (4, 2)),
        ("python t.py train.bs=4 +acc=2", ("train.bs=micro_batch_size", ACC), (4, 2)),
        ("python t.py --bs 1 --bs 5 --acc 2", ("bs=micro_batch_size", ACC), (5, 2)),
        # A known name counts where no flag says otherwise, and one that a flag takes does not.
        ("python t.py --micro_batch_size 3 --acc 2", (ACC,), (3, 2)),
        (
            "python t.py --train_batch_size 24 --micro_batch_size 3",
            ("train_batch_size=global_batch_size",),
            (3, 4),
        ),
    ],
)
def test_ways_to_write_an_argument(command, flags, parts) -> None:
    geometry = check_configs([], command.split(), devices=2, flags=flags).running.geometry
    assert geometry is not None
    assert (geometry.micro_batch_size, geometry.gradient_accumulation_steps) == parts


@pytest.mark.parametrize(
    ("flags", "command", "words"),
    [
        (("batch-size",), OWN, "--flag is NAME=WORD, .* given 'batch-size'"),
        (("=micro_batch_size",), OWN, "--flag is NAME=WORD"),
        (("batch-size=batch",), OWN, "one of micro_batch_size, gradient_acc.* given 'batch-size=b"),
        ((MICRO, "--batch_size=global_batch_size"), OWN, "no NAME and no WORD may come twice"),
        ((MICRO, "grad-accum=micro_batch_size"), OWN, "no NAME and no WORD may come twice"),
        (("bs=micro_batch_size",), OWN, "names --bs, .* it has --batch_size, --grad_accum"),
        ((MICRO,), "", "give its launch command"),
        ((MICRO,), OWN.replace("4", "four"), "batch_size must be an int .*'four'"),
        ((MICRO,), OWN.replace("4", "$X"), r"--batch_size is \$X, which only running"),
        (("bs=global_batch_tokens",), OWN, "global_batch_tokens and sequence_length together"),
    ],
)
def test_flags_that_cannot_be_right(flags, command: str, words: str, tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match=words):
        check_configs([path], command.split(), flags=flags)


def test_own_arguments_beside_a_json_are_not_taken_for_the_trainers(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}')
    command = [*OWN.split(), "--deepspeed", str(path)]
    (found,) = check_configs([], command, flags=(MICRO, ACCUMULATION)).findings
    assert found.rule == "micro-batch"
    assert "train_micro_batch_size_per_gpu 2 is not" in found.message
    assert "DeepSpeed goes by the JSON" in found.message
    assert found.fix == (
        "make both equal: train_micro_batch_size_per_gpu 4 in the DeepSpeed JSON, or batch_size 2"
    )


def test_a_json_that_says_nothing_is_given_the_number_and_not_auto(tmp_path, monkeypatch) -> None:
    """Were it "auto", the launcher's own accumulation would decide, and not the script's."""
    monkeypatch.chdir(tmp_path)
    path = Path("ds.json")
    path.write_text('{"train_micro_batch_size_per_gpu": 4}')
    command = (
        f"accelerate launch --use_deepspeed --deepspeed_config_file {path} --num_processes 2 "
        "t.py --train_batch_size 4 --gradient_accumulation_steps 8"
    )
    found = {one.rule: one for one in check_configs([], command.split()).findings}
    assert '"gradient_accumulation_steps": 8' in found["accumulation-missing"].fix
    path.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}')
    assert check_configs([], command.split()).is_consistent


@pytest.mark.parametrize("starter", ["srun -n 4", "mpirun -np 4", "mpiexec -n 4"])
def test_processes_of_a_starter_are_asked_for(starter: str) -> None:
    words = f"{starter} python t.py --micro_batch_size 4 --gradient_accumulation_steps 2".split()
    assert check_configs([], ["CUDA_VISIBLE_DEVICES=0", *words]).verdict == "cannot tell"
    geometry = check_configs([], words, devices=4).running.geometry
    assert geometry is not None
    assert geometry.global_batch_size == 32
