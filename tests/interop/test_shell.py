"""The reader of launch scripts, against bash itself."""

from __future__ import annotations

import contextlib
import re
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
    # What only running it would tell has braces, whether or not it is written with them.
    return [re.sub(r"\$\{(\w+)\}", r"$\1", word) for word in command.words[1:]]


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
    "A=64 B=3\nlaunch $((A / B)) $((A*B+1)) $(( (A - 1) / B ))",
    'A=8\nB=$((A*2))\nC="$((B/3)) $B"\nlaunch $C "$C"',
    'B=2\nARGS=(--a 1\n  --b "$B"  # why\n)\nlaunch "${ARGS[@]}" z',
    "export X=3\nlaunch --n=$X",
    "X=3 launch a; X=5",
    'export "X=3"\nY=2\ndeclare "Y=$X 4" Z\nexport \'V=a b\'\nlaunch $X "$Y" "$V"',
    "Y=X=5\nexport $Y\nlaunch $X",
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
    "cat <<END > /dev/null\nlaunch no\nEND\nlaunch yes",
    "A=1 B=2\n\nA=3 launch $A$B; launched=$A",
    "launch a > /dev/stdout b",
    "export A=1 && export B=$A && launch $B",
    "X=\nlaunch ${X:-3} ${Y:-${X:-2}}",
    "launch a \\\n",
    "X=a Y=b\nZ=./$X/$Y.json\nlaunch $X-$Y-$X.log $Z/$Y.$X",
    'launch "  ${X:-1}  $((2 * 3))\n y" "a \\\n  b"',
]


@needs_bash
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    assert read_by_us(script) == told_by_bash(script)


def test_blanks_of_a_command_that_is_not_run_end_no_word():
    script = 'A=$(hosts $X | head -n 1)\nB="--to $A:6000  --n 2"\nlaunch $B `id -u`/x\n'
    (command,) = commands_of("x.sh", script)
    assert [word.replace("\N{NO-BREAK SPACE}", " ") for word in command.words] == [
        "launch",
        "--to",
        "$(hosts ${X} | head -n 1):6000",
        "--n",
        "2",
        "`id -u`/x",
    ]


PIECES = (
    r"""a 1 / . , _ - = --b [0] % @ : $X ${X} $Y $N ${Z:-q} $((N*2)) "$X" "$Y.$X/" " $X b " """
    r"""'c $X' "${A[@]}" ${A[@]} "\$X\"" a\ b"""
)


@needs_bash
@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(re.findall(r"\"(?:\\.|[^\"])*\"|'[^']*'|(?:\\ |\S)+", PIECES)))
        .map("".join)
        .filter(lambda word: not re.search(r"\$[XYN][\w\[]|^==", word)),
        min_size=1,
        max_size=4,
    )
)
def test_words_of_many_pieces_are_those_of_bash(words: list[str]) -> None:
    """What the grammar makes of each neighbourhood is not ours to know: bash says."""
    lines = [f"V={word}\nlaunched=$V" for word in words if "A[@]" not in word]
    script = "set -f\nV=; X=u; Y='v w'; N=7; A=(p 'q r')\n" + "\n".join(lines)
    script += f'\nlaunch $V "$V" {" ".join(words)} end'
    assert read_by_us(script) == told_by_bash(script)


@needs_bash
@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    left=st.integers(0, 200),
    right=st.integers(1, 9),
    operator=st.sampled_from("+-*/"),
)
def test_sums_are_those_of_bash(left: int, right: int, operator: str) -> None:
    script = f"L={left}\nR={right}\nlaunch $((L {operator} R)) $(( (L + R * 2) {operator} 3 ))"
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
        ("ds --num_gpus 3 t.py", "deepspeed", 3),
        ("ds t.py", "deepspeed", None),
        ("mkdir ds\npython t.py", "python", 1),
        ("python -m deepspeed.launcher.runner --num_gpus 3 t.py", "deepspeed", 3),
        ("python -m deepspeed.launcher.runner t.py", "deepspeed", None),
        ("python -m litgpt pretrain x", "litgpt", None),
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
    assert launch.options["seed"] == "${RANDOM}"


CONTROL_FLOW = {
    "MICRO=2\nif [ $BIG ]; then MICRO=4; fi\n": "the if of line 2",
    "if [ $BIG ]\nthen\n  MICRO=4\nelse\n  MICRO=2\nfi\n": "the if of line 1",
    'if [ -z "$MICRO" ]; then MICRO=4; fi\n': "the if of line 1",
    'MICRO=2\n[ -n "$BIG" ] && MICRO=4\n': "the && of line 2",
    "grep -q A100 gpus || MICRO=4\n": "the || of line 1",
    "MICRO=2\ncase $BIG in\n  yes)\n    MICRO=4\n    ;;\nesac\n": "the case of line 2",
    "MICRO=2\nfor MICRO in 4 8; do true; done\n": "the for of line 2",
    "while read line; do MICRO=$line; done < sizes\n": "the while of line 1",
    "until MICRO=4; do true; done\n": "the until of line 1",
    "choose() {\n  export MICRO=4\n}\n": "the function of line 1",
    "MICRO=2\n(MICRO=4)\n": r"the \( \) of line 2",
    "if [ $BIG ]; then : ${MICRO:=4}; fi\n": "the if of line 1",
    "if [ $BIG ]; then HALF=4; fi\nMICRO=$((HALF * 2))\n": "the if of line 1",
}
LAUNCH = "torchrun --nproc_per_node 2 run.py --per_device_train_batch_size $MICRO\n"


@pytest.mark.parametrize("script", CONTROL_FLOW)
def test_a_number_that_control_flow_decides_is_refused_by_name(script: str) -> None:
    words = f"--per_device_train_batch_size is .*, which {CONTROL_FLOW[script]} decides"
    with pytest.raises(ConfigError, match=words):
        read_script("train.sh", script + LAUNCH)
    half = LAUNCH.replace("$MICRO", "$((MICRO / 1))").strip()
    with pytest.raises(ConfigError, match=words):
        read_script("train.sh", f'{script}srun bash -c "{half} --name $(date -I | cut -c 1-4)"')
    options = read_script("train.sh", f"{script}MICRO=8\n{LAUNCH}").options
    assert options["per_device_train_batch_size"] == "8", "what comes afterwards decides"


RUN = LAUNCH.strip()
NOT_CERTAIN = {
    f"MICRO=1\nwhile true; do\n{RUN}\nMICRO=$((MICRO*2)); done": "the while of line 2",
    f"for i in 1 2; do {RUN.replace('$MICRO', '${MICRO:-4}')}; MICRO=8; done": "the for of line 1",
    f"MICRO=4\nrun(){{ {RUN}; }}\nMICRO=8\nrun": "the function of line 2",
    f"run(){{ {RUN.replace('$MICRO', '${MICRO:-1}')}; }}\nMICRO=8\nrun": "the function of line 1",
    f"run(){{ {RUN.replace('$MICRO', '${1:-1}')}; }}\nrun 8": "the function of line 1",
    f"set_it(){{ MICRO=8; }}\nMICRO=4\nset_it\n{RUN}": "the set_it of line 3",
    f"f(){{ MICRO=8; }}\nMICRO=4\nfor i in 1 2; do {RUN}; f; done": "the for of line 3",
    f"if true; then MICRO=4; else {RUN}; fi": "the if of line 1",
    f"MICRO=4\nunset MICRO\n{RUN}": "the unset of line 2",
    f"MICRO=4\nread -r MICRO\n{RUN}": "the read of line 2",
    f"MICRO=4\n((MICRO*=2))\n{RUN}": r"the \(\( of line 2",
    f"MICRO=4\n((MICRO++))\n{RUN}": r"the \(\( of line 2",
    f"MICRO=4\nN=$((MICRO*=2))\n{RUN}": r"the \$\(\( of line 2",
    f"MICRO=4\nlet MICRO*=2\n{RUN}": "the let of line 2",
    f"MICRO=4\nprintf -v MICRO %d 8\n{RUN}": "the printf of line 2",
    f"MICRO=4\nsource sizes.sh\n{RUN}": "the source of line 2",
    f". sizes.sh\n{RUN.replace('$MICRO', '${MICRO:-1}')}": r"the \. of line 1",
    f"MICRO=4\neval MICRO=8\n{RUN}": "the eval of line 2",
    f"MICRO=4\nMICRO[0]=8\n{RUN}": r"the MICRO\[0\]= of line 2",
    f"MICRO=4\nexport $(cat sizes)\n{RUN}": r"the \$\(cat sizes\) of line 2",
    f'MICRO=4\nif true; then export "MICRO=8"; fi\n{RUN}': "the if of line 2",
    f"cd x && MICRO=4\n{RUN}": "the && of line 1",
    f"cd x && MICRO=4 || {RUN}": "the && of line 1",
    f"cd x || MICRO=4 && {RUN}": r"the \|\| of line 1",
    f"MICRO=8 | cat\n{RUN}": r"the \| of line 1",
}


@pytest.mark.parametrize("script", NOT_CERTAIN)
def test_a_number_that_may_be_another_when_it_is_used_is_refused(script: str) -> None:
    words = f"--per_device_train_batch_size is .*, which {NOT_CERTAIN[script]} decides"
    with pytest.raises(ConfigError, match=words):
        read_script("train.sh", script + "\n")


@pytest.mark.parametrize(
    "script",
    [
        f"run(){{ {RUN}; }}\nrun",
        f"source venv/bin/activate\n{RUN}",
        f'eval "$(conda shell.bash hook)"\n{RUN}',
        f"read -r NAME < name\nunset OTHER\n((STEP++))\n{RUN}",
        f"{RUN} ${{MICRO:+--bf16}}",
        f"source sizes.sh\nMICRO=4\n{RUN}",
        f'MICRO=1\nmain(){{ local MICRO=4; {RUN}; }}\nmain "$@"\nMICRO=2',
        f"MICRO=1\nfor seed in 1 2; do MICRO=4; {RUN} --seed $seed; done",
        f"MICRO=1\ncd x && MICRO=4 && {RUN}",
        f"MICRO=1\nif true; then MICRO=2; else MICRO=4; {RUN}; fi",
        f"MICRO=1\n(MICRO=4; {RUN})",
    ],
)
def test_a_number_that_is_certain_is_read(script: str) -> None:
    options = read_script("train.sh", f"MICRO=4\n{script}\n").options
    assert options["per_device_train_batch_size"] == "4"


@pytest.mark.parametrize(
    "line",
    [
        "srun bash -l -c 'torchrun t.py --micro_batch_size 4'",
        "bash -x -c 'torchrun t.py --micro_batch_size 4'",
        "bash -euo pipefail -c 'torchrun t.py --micro_batch_size 4'",
        "bash --login -c 'torchrun t.py --micro_batch_size 4'",
        "/bin/zsh -c 'torchrun t.py --micro_batch_size 4'",
        "dash -c 'torchrun t.py --micro_batch_size 4'",
        "bash -c 'cd x; bash -lc \"torchrun t.py --micro_batch_size 4\"'",
        "eval 'torchrun t.py --micro_batch_size 4'",
        "cat <<EOF > f && torchrun t.py --micro_batch_size 4\na: 1\nEOF",
    ],
)
def test_a_launch_behind_a_shell_or_a_document_is_found(line: str) -> None:
    launch = read_script("x.sh", f"{line}\npython prepare.py --micro_batch_size 9\n")
    assert launch.launcher == "torchrun"
    assert launch.options["micro_batch_size"] == "4"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('bash -c "$RUN"', r"x.sh: bash -c in line 1 runs \$\{RUN\}, which only running"),
        ('srun zsh -lc "$(cat run)"', r"x.sh: zsh -c in line 1 runs \$\(cat.run\), which only"),
        ('X=\'bash -c "$X"\'; bash -c "$X"', "in line 1: shells within each other, deeper"),
    ],
)
def test_a_shell_that_cannot_be_read_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_script("x.sh", f"{line}\npython prepare.py --micro_batch_size 9\n")


def test_options_that_are_there_if_a_variable_is_set_are_refused() -> None:
    script = "torchrun t.py ${MICRO:+--per_device_train_batch_size $MICRO}\n"
    with pytest.raises(ConfigError, match=r"holds, only running the script would tell; give"):
        read_script("train.sh", script)
    with pytest.raises(ConfigError, match=r"holds, the read of line 1 decides; give"):
        read_script("train.sh", f"read MICRO\n{script}")
    options = read_script("train.sh", f"MICRO=4\n{script}").options
    assert options["per_device_train_batch_size"] == "4"


@pytest.mark.parametrize(
    "script",
    [
        "A='--global_batch_size 4'\nif [ $B ]; then A=\"$A --bf16\"; fi\n",
        "A='--bf16'\nif [ $B ]; then A='--bf16 --global_batch_size 4'; fi\nA=\"$A --x 1\"\n",
        "if [ $B ]; then A=--bf16; fi\n",
        "A=(--bf16)\nif [ $B ]; then A+=(--global_batch_size 4); fi\n",
        "A=(--bf16)\nif [ $B ]; then A+=(--global_batch_size 4); fi\nA+=(--x 1)\n",
        "for A in '--global_batch_size 4'; do true; done\n",
    ],
)
def test_options_that_control_flow_decides_are_refused_by_name(script: str) -> None:
    word = '"${A[@]}"' if "(" in script else "$A"
    launch = f"torchrun --nproc_per_node 2 run.py --fp16 {word}\n"
    words = r"what \$.* holds, the (if|for) of line \d decides"
    with pytest.raises(ConfigError, match=words):
        read_script("train.sh", script + launch)
    if "(" not in script:
        with pytest.raises(ConfigError, match=words):
            read_script("train.sh", f'{script}srun bash -c "{launch.strip()}"')


def test_control_flow_that_decides_nothing_of_the_batch_may_stand_in_a_script() -> None:
    script = (
        'if [ ! -d "$OUT" ]; then mkdir -p "$OUT"; fi\n'
        "for seed in 1 2 3; do\n"
        f"  {LAUNCH.strip()} --seed $seed 2>&1 | tee log-$seed\ndone\n"
    )
    launch = read_script("train.sh", f"MICRO=2\n{script}")
    assert launch.name == "train.sh:4"
    assert launch.options["per_device_train_batch_size"] == "2"


def test_a_line_that_is_none_of_bash_is_named() -> None:
    with pytest.raises(ConfigError, match=r"x.sh: line 2 cannot be read as bash, at \); give the"):
        read_script("x.sh", "X=1\ntorchrun a.py )\n")
    with pytest.raises(ConfigError, match=r"what begins in line 1 has no closing done; give"):
        read_script("x.sh", "for a in b; do\n  torchrun a.py\n")
    with pytest.raises(ConfigError, match=r"x.sh: bash -c in line 2: line 1 cannot be read"):
        read_script("x.sh", "X=1\nbash -c 'torchrun \"a.py'\n")


@pytest.mark.parametrize(
    "wide", ["训练", "😀", "\N{LATIN SMALL LETTER Y WITH DIAERESIS}", "\U0010fffd"]
)
def test_wide_characters_are_read_as_they_are(wide: str) -> None:
    script = (
        f"X={wide}\nlaunch {wide}.py \"a {wide} b\" '{wide}' $X  # {wide}\nbash -c 'launch {wide}'"
    )
    first, inner = commands_of("x.sh", script)
    assert first.words == ("launch", f"{wide}.py", f"a {wide} b", wide, wide)
    assert inner.words[-1] == wide


def test_no_character_ends_the_process() -> None:
    """The grammar's own table of characters ends early: what lies behind may not be mapped."""
    for code in range(0xE000, 0x110000, 0xFFD):
        with contextlib.suppress(ConfigError):
            commands_of("x.sh", f"launch {chr(code)} --a={chr(code)}")
