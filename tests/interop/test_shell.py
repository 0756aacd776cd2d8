"""The reader of launch scripts, against bash itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.errors import ConfigError
from batchscape.interop.command import read_script
from batchscape.interop.shell import commands_of

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="the oracle is bash")


def told_by_bash(script: str) -> list[str]:
    """Words that bash hands to `launch`, a function that prints them apart."""
    assert BASH is not None
    text = "launch() { printf '%s\\0' \"$@\"; }\nexport -f launch\n" + script
    done = subprocess.run([BASH, "-c", text], capture_output=True, text=True, check=True, env={})
    return done.stdout.split("\0")[:-1]


def read_by_us(script: str) -> list[str]:
    (command,) = [one for one in commands_of("script", script) if one.words[0] == "launch"]
    return list(command.words[1:])


SCRIPTS = [
    "launch a b  c",
    "launch 'a  b' \"c  d\" e\\ f",
    "launch a \\\n  --b 1 \\\n  --c",
    "# launch no\nlaunch yes # no",
    "launch a#b '#c' \"#d\"",
    "X=1; Y=2\nlaunch $X ${Y} $X$Y \"$X-$Y\" '$X'",
    "X='a b'\nlaunch $X \"$X\" x$X",
    "X='--a 1'\nX+=' --b 2'\nlaunch $X",
    'A=(a b)\nA+=(c d)\nlaunch "${A[@]}"',
    'A+=(a)\nA=(b)\nlaunch "${A[@]}"',
    "X=4\nlaunch ${X:-8} ${Z:-8} ${Z-9} ${Z:-}",
    "A=64 B=3\nlaunch $((A / B)) $((A*B+1)) $((A % B)) $(( (A - 1) / B )) $((-7 / 2))",
    'A=8\nB=$((A*2))\nC="$((B/3)) $B"\nlaunch $C "$C"',
    'B=2\nARGS=(--a 1\n  --b "$B"  # why\n)\nlaunch "${ARGS[@]}" z',
    "export X=3\nlaunch --n=$X",
    "X=3 launch a; X=5",
    "true && launch a || false",
    "launch a > /dev/stdout 2>&1",
    "X=1\nX=2\nlaunch $X",
    'launch "a \\"b\\" c" "d \\$e"',
    "launch a 2>/dev/null",
    "launch --x='1,2' --y=\"3\"4",
    ": ${X:=4} ${X:=5} ${Y=6}\nlaunch $X ${X:=7} $Y",
    "X=\nlaunch a ${X=4} ${X:=5} $X",
    "declare -i -x X=4\ntypeset Y=5\nlaunch $X $Y",
    "export A=1 B=2\nlaunch $A$B",
    'X=3\nlaunch "\\$X" "\\\\$X" "$X\\$X"',
    "export X=3\nbash -c 'launch $X \"a b\" $((X * 2))'",
    'X=3\nCMD="launch --n $X"\nbash -c "$CMD --m \\$((4 / 2))"',
    "export X=3\nbash -lc 'Y=$X; true && launch $Y'",
    "bash -c \"bash -c 'launch a b'\"",
]


@needs_bash
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    assert read_by_us(script) == told_by_bash(script)


def test_shells_within_shells_come_to_an_end():
    script = 'X=\'bash -c "$X"\'\nbash -c "$X"\n'
    assert all(command.words[0] == "bash" for command in commands_of("x.sh", script))


def test_blanks_of_a_command_that_is_not_run_end_no_word():
    script = 'A=$(hosts $X | head -n 1)\nB="--to $A:6000  --n 2"\nlaunch $B `id -u`/x\n'
    (command,) = commands_of("x.sh", script)
    assert command.words == (
        "launch",
        "--to",
        "$(hosts $X | head -n 1):6000",
        "--n",
        "2",
        "`id -u`/x",
    )


@needs_bash
@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    left=st.integers(-50, 200),
    right=st.integers(-9, 9).filter(bool),
    operator=st.sampled_from("+-*/%"),
)
def test_sums_are_those_of_bash(left: int, right: int, operator: str) -> None:
    script = f"L={left}\nR={right}\nlaunch $((L {operator} R)) $(( (L + R) {operator} 3 ))"
    assert read_by_us(script) == told_by_bash(script)


def test_a_division_with_a_remainder_is_told() -> None:
    launch = read_script("x.sh", "G=100\ntorchrun --nproc_per_node $((G / 8)) train.py\n")
    assert launch.floors == ("100 / 8 = 12, remainder 4",)
    even = read_script("x.sh", "G=96\ntorchrun --nproc_per_node $((G / 8)) train.py\n")
    assert even.floors == ()


@pytest.mark.parametrize(
    ("command", "launcher", "devices"),
    [
        ("torchrun --nproc_per_node 4 t.py", "torchrun", 4),
        ("torchrun --nnodes=2 --nproc-per-node=4 t.py", "torchrun", 8),
        ("/opt/bin/torchrun --standalone t.py", "torchrun", 1),
        ("python3.11 -u -m torch.distributed.run --nproc_per_node 2 t.py", "torchrun", 2),
        ("srun --nodes 2 torchrun --nnodes 2 --nproc_per_node 8 t.py", "torchrun", 16),
        ("nohup torchrun -m pkg.train --nproc_per_node 8", "torchrun", 1),
        ("torchrun --nproc_per_node auto t.py", "torchrun", None),
        ("deepspeed t.py --num_gpus 3", "deepspeed", None),
        ("deepspeed --num_gpus 3 t.py", "deepspeed", 3),
        ("deepspeed --include a:0,1@b:0,1,2 t.py", "deepspeed", 5),
        ("deepspeed --include a@b t.py", "deepspeed", None),
        ("deepspeed --hostfile hosts --num_gpus 8 t.py", "deepspeed", None),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8 t.py", "deepspeed", 16),
        ("accelerate launch --num_processes 6 t.py", "accelerate", 6),
        ("python t.py --nproc_per_node 4", "python", 1),
        ("python -m train", "python", 1),
        ("litgpt pretrain x", "litgpt", None),
    ],
)
def test_launchers_and_their_processes(command: str, launcher: str, devices: int | None) -> None:
    launch = read_script("x.sh", f"python prepare.py\n{command}\n" if "tor" in command else command)
    assert launch.launcher == launcher
    found = launch.statement.devices
    assert (None if found is None else found.value) == devices


def test_what_does_not_matter_may_stay_unknown(tmp_path: Path) -> None:
    text = "torchrun --master_port $PORT --nproc_per_node 2 t.py --seed $RANDOM --name $(date)\n"
    launch = read_script(str(tmp_path), text)
    assert launch.statement.devices is not None
    assert launch.options["seed"] == "$RANDOM"


CONDITIONAL = [
    "MICRO=2\nif [ $BIG ]; then MICRO=4; fi\n",
    "if [ $BIG ]\nthen\n  MICRO=4\nelse\n  MICRO=2\nfi\n",
    'MICRO=2\n[ -n "$BIG" ] && MICRO=4\n',
    "MICRO=2\ncase $BIG in\n  yes)\n    MICRO=4\n    ;;\nesac\n",
    "MICRO=2\nfor MICRO in 4 8; do true; done\n",
]


@pytest.mark.parametrize("script", CONDITIONAL)
def test_a_number_that_a_condition_decides_is_refused(script: str) -> None:
    launch = "torchrun --nproc_per_node 2 run.py --per_device_train_batch_size $MICRO\n"
    with pytest.raises(ConfigError, match=r"is \$MICRO, which only running"):
        read_script("train.sh", script + launch)
    options = read_script("train.sh", f"{script}MICRO=8\n{launch}").options
    assert options["per_device_train_batch_size"] == "8", "what comes afterwards decides"


def test_options_that_a_condition_decides_are_refused() -> None:
    script = "A='--global_batch_size 4'\nif [ $B ]; then A=\"$A --bf16\"; fi\n"
    with pytest.raises(ConfigError, match=r"\$A holds depends on a condition"):
        read_script("train.sh", f"{script}torchrun --nproc_per_node 2 run.py $A\n")


def test_a_default_that_a_condition_sets_is_followed() -> None:
    script = 'if [ -z "$GPUS" ]; then GPUS=2; fi\ntorchrun --nproc_per_node $GPUS run.py\n'
    devices = read_script("train.sh", script).statement.devices
    assert devices is not None
    assert devices.value == 2
