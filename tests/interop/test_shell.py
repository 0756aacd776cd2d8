"""The reader of launch scripts, against bash itself."""

import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.errors import ConfigError
from batchscape.interop.launch import read_script
from batchscape.interop.shell import commands_of

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="the oracle is bash")


def words_of_bash(script):
    """Words that bash hands to `launch`, a function that prints them apart."""
    assert BASH is not None
    text = "launch() { printf '%s\\0' \"$@\"; }\nexport -f launch\n" + script
    done = subprocess.run([BASH, "-c", text], capture_output=True, check=True, env={})
    return done.stdout.decode().split("\0")[:-1]


def read_by_us(script):
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
    "A=64 B=3\nlaunch $((A / B)) $((A*B)) $(( A / (2 * B) ))",
    'A=8\nB=$((A*2))\nC="$((B/3)) $B"\nlaunch $C "$C"',
    'B=2\nARGS=(--a 1\n  --b "$B"  # why\n)\nlaunch "${ARGS[@]}" z',
    "export X=3\nlaunch --n=$X",
    "X=3 launch a; X=5",
    'export "X=3"\nexport \'V=a b\'\nlaunch $X "$V"',
    "X=1 Y=$X\nunset X\nlaunch $Y ${X:-2}",
    'A=(a # don\'t (\n  \'b c\' # $X\n)\nlaunch "${A[@]}" "${A[*]}" ${A[*]}',
    "cd / && launch 'a;b' \"c|d\" e\\;f; launched=1",
    'DIR="$(cd "$(dirname "$0")" && echo \'a;b\')"; launch a',
    "true && launch a || false",
    "launch a > /dev/stdout 2>&1",
    "X=1\nX=2\nlaunch $X",
    'launch "a \\"b\\" c" "d \\$e"',
    "launch a 2>/dev/null",
    "launch --x='1,2' --y=\"3\"4",
    "export A=1 B=2\nlaunch $A$B",
    'X=3\nlaunch "\\$X" "\\\\$X" "$X\\$X"',
    "A=1 B=2\n\nA=3 launch $A$B; launched=$A",
    "launch a > /dev/stdout b",
    "A=1\nA=3 true\nlaunch $A",
    "A='2*3'\nlaunch $((12 / A))",
    "X=\nlaunch ${X:-3} ${Y:-${X:-2}}",
    "launch a \\\n",
    "launch ${Q:-d e} \"${Q:-d e}\" x${Q:-'a'}",
    "X=a Y=b\nZ=./$X/$Y.json\nlaunch $X-$Y-$X.log $Z/$Y.$X",
    'launch "  ${X:-1}  $((2 * 3))\n y" "a \\\n  b"',
    "N=4*2\nlaunch $((64/$N)) $((64/${N})) $((64/N))",
    'X=a\rb\nlaunch $X "c"\r"d" e\rf \'\r\'\nX="x"\r"y"\nlaunched=$X',
    "builtin export X=3\ncommand export Y=4\nlaunch $X $Y",
]


@needs_bash
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script):
    assert read_by_us(script) == words_of_bash(script)


def test_a_last_line_that_would_be_continued_is_a_command():
    (command,) = commands_of("script", "N=2\nlaunch --n $N \\")
    assert (command.words, command.line) == (("launch", "--n", "2"), 2)


def test_blanks_of_a_command_that_is_not_run_end_no_word():
    script = 'A=$(hosts $X | head -n 1)\nB="--to $A:6000  --n 2"\nlaunch $B `id -u`/x\n'
    (command,) = commands_of("x.sh", script)
    words = [word.replace("\N{NO-BREAK SPACE}", " ") for word in command.words]
    assert words == [
        *("launch", "--to", "$(hosts $X | head -n 1):6000", "--n", "2"),
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
def test_words_of_many_pieces_are_those_of_bash(words):
    """What the grammar makes of each neighbourhood is not ours to know: bash says."""
    lines = [f"V={word}\nlaunched=$V" for word in words if "A[@]" not in word]
    script = "set -f\nV=; X=u; Y='v w'; N=7; A=(p 'q r')\n" + "\n".join(lines)
    script += f'\nlaunch $V "$V" {" ".join(words)} end'
    assert read_by_us(script) == words_of_bash(script)


@needs_bash
@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    first=st.integers(0, 200),
    second=st.integers(1, 9),
    operator=st.sampled_from("*/"),
)
def test_products_are_those_of_bash(first, second, operator):
    script = f"L={first}\nR={second}\nlaunch $((L {operator} R)) $(( (L * R) {operator} 3 ))"
    assert read_by_us(script) == words_of_bash(script)


def launch_of(text, flags=()):
    return read_script("x.sh", text, dict(flags))


def test_a_division_with_a_remainder_is_told():
    launch = launch_of("G=100\ntorchrun --nproc_per_node $((G / 8)) train.py\n")
    assert launch.floors == ("100 / 8 = 12, remainder 4",)
    even = launch_of("G=96\ntorchrun --nproc_per_node $((G / 8)) train.py\n")
    assert even.floors == ()


@pytest.mark.parametrize(
    ("command", "launcher", "devices"),
    [
        ("torchrun --nproc_per_node 4 t.py", "torchrun", 4),
        ("torchrun --nnodes=2 --nproc-per-node=4 t.py", "torchrun", 8),
        ("/opt/bin/torchrun --standalone t.py", "torchrun", None),
        ("python3.11 -u -m torch.distributed.run --nproc_per_node 2 t.py", "torchrun", 2),
        ("srun --nodes 2 torchrun --nnodes 2 --nproc_per_node 8 t.py", "torchrun", 16),
        ("nohup torchrun -m pkg.train --nproc_per_node 8", "torchrun", None),
        ("torchrun --nproc_per_node auto t.py", "torchrun", None),
        ("deepspeed t.py --num_gpus 3", "deepspeed", None),
        ("deepspeed --num_gpus 3 t.py", "deepspeed", 3),
        ("python -m deepspeed.launcher.runner --num_gpus 3 t.py", "deepspeed", 3),
        ("python -m deepspeed.launcher.runner t.py", "deepspeed", None),
        ("python -m litgpt pretrain x", "litgpt", None),
        ("deepspeed --include a:0,1 t.py", "deepspeed", 2),
        ("deepspeed --include a:0,1@b:0,1 --num_gpus 8 t.py", "deepspeed", None),
        ("deepspeed --hostfile hosts --num_gpus 8 t.py", "deepspeed", None),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8 t.py", "deepspeed", 16),
        ("accelerate launch --num_processes 6 t.py", "accelerate", 6),
        ("python t.py --nproc_per_node 4", "python", None),
        ("python -m train", "python", None),
        ("CUDA_VISIBLE_DEVICES=3 python t.py", "python", 1),
        ("CUDA_VISIBLE_DEVICES=0,1 python t.py", "python", None),
        ("CUDA_VISIBLE_DEVICES=3 python submit.py -- sh run.sh", "python", None),
        ("CUDA_VISIBLE_DEVICES=3 mpirun -np 4 python t.py", "python", None),
        ("python submit.py --nodes 2 -- torchrun --nproc_per_node 4 t.py", "torchrun", 4),
        ("python t.py --strategy deepspeed --x b.py", "python", None),
        ("python -m paddle.distributed.launch --gpus 0,1,2 t.py", "python", None),
        ("litgpt pretrain x", "litgpt", None),
    ],
)
def test_launchers_and_their_processes(command, launcher, devices):
    launch = launch_of(f"python prepare.py\n{command}\n" if "tor" in command else command)
    assert launch.launcher == launcher
    stated = launch.statement.facts.get("devices")
    assert (None if stated is None else stated.value) == devices


def test_what_does_not_matter_may_stay_unknown():
    text = "torchrun --master_port $PORT --nproc_per_node 2 t.py --seed $RANDOM --name $(date)\n"
    assert launch_of(text).statement.facts["devices"].value == 2


RUN = "torchrun --nproc_per_node 2 run.py --per_device_train_batch_size $MICRO"
REFUSED = {
    f"MICRO=2\nif [ $BIG ]; then MICRO=4; fi\n{RUN}": "line 2 has if",
    f"MICRO=2\n[ -n $BIG ] && MICRO=4\n{RUN}": "line 2 has an assignment beside &&",
    f"grep -q A100 gpus || MICRO=4\n{RUN}": r"line 1 has an assignment beside \|\|",
    f"MICRO=8 | cat\n{RUN}": r"line 1 has an assignment beside \|",
    f"MICRO=8 &\n{RUN}": "line 1 has an assignment beside &",
    f"cd x && export MICRO=8\n{RUN}": "line 1 has export MICRO=8",
    f"export $(cat sizes)\n{RUN}": r"line 1 has export \$\(cat",
    f"case $BIG in\n  yes)\n    MICRO=4\n    ;;\nesac\n{RUN}": "line 1 has case",
    f"for MICRO in 4 8; do {RUN}; done": "line 1 has for",
    f"while read MICRO; do {RUN}; done < sizes": "line 1 has while",
    f"choose() {{\n  MICRO=4\n}}\nchoose\n{RUN}": r"line 1 has \(,",
    f"function choose {{ MICRO=4; }}\nchoose\n{RUN}": "line 1 has function",
    f"{{ MICRO=4; }}\n{RUN}": "line 1 has {",
    f"(MICRO=4; {RUN})": r"line 1 has \(,",
    f"MICRO=4\n((MICRO*=2))\n{RUN}": r"line 2 has \(,",
    f"MICRO=4\nN=$((MICRO*=2))\n{RUN}": r"line 2 has \$\(\(",
    f"MICRO=4\nN=$((MICRO++))\n{RUN}": r"line 2 has \$\(\(",
    f"MICRO=4\nread -r MICRO\n{RUN}": "line 2 has read",
    f"MICRO=4\nlet MICRO*=2\n{RUN}": "line 2 has let",
    f"readonly MICRO=4\n{RUN}": "line 1 has readonly",
    f"MICRO=4\nprintf -v MICRO %d 8\n{RUN}": "line 2 has printf",
    f"MICRO=4\nsource sizes.sh\n{RUN}": "line 2 has source",
    f". sizes.sh\n{RUN}": r"line 1 has \.",
    f"eval MICRO=8\n{RUN}": "line 1 has eval",
    f"declare -i MICRO=4\n{RUN}": "line 1 has declare",
    f"builtin eval MICRO=8\n{RUN}": "line 1 has eval",
    f"MICRO=4\nbuiltin declare MICRO=8\n{RUN}": "line 2 has declare",
    f"command source sizes.sh\n{RUN}": "line 1 has source",
    f"command -p read MICRO\n{RUN}": "line 1 has read",
    f"set -- 8\nMICRO=${{1:-2}}\n{RUN}": "line 1 has set",
    f"set -e -- 8\nMICRO=${{1:-2}}\n{RUN}": "line 1 has set",
    f"set 8\nMICRO=${{1:-2}}\n{RUN}": "line 1 has set",
    f"source configs/profile_a100.env\n{RUN}": "line 1 has source",
    f". ~/conda/sizes\n{RUN}": r"line 1 has \.",
    f"eval $(cat conda.env)\n{RUN}": "line 1 has eval",
    f"MICRO[0]=8\n{RUN}": r"line 1 has MICRO\[0\]=",
    f": ${{MICRO:=4}}\n{RUN}": r"line 1 has \$\{MICRO:=",
    f"cat <<EOF > f\na\nEOF\n{RUN}": "line 1 has <<",
    "X=1\nsrun bash -lc 'torchrun t.py --micro_batch_size 4'": "line 2 has bash -lc",
}


@pytest.mark.parametrize("script", REFUSED)
def test_what_may_decide_a_number_elsewhere_is_refused_with_its_line(script):
    with pytest.raises(ConfigError, match=REFUSED[script]) as caught:
        launch_of(script + "\n")
    assert "batchscape check-config -- COMMAND" in str(caught.value)


@pytest.mark.parametrize(
    "script",
    [
        f"source venv/bin/activate\nset -euo pipefail\n{RUN}",
        f". /etc/profile; source ~/.bashrc\nset -- \nset -o pipefail\n{RUN}",
        f'source "$(conda info --base)/etc/profile.d/conda.sh"\nsource activate deepspeed\n{RUN}',
        f"source /etc/profile.d/cuda.sh\nconda activate deepspeed\nmodule load deepspeed\n{RUN}",
        f"pip3 install deepspeed\nmkdir -p deepspeed\ncommand -v torchrun\n{RUN}",
        f'eval "$(conda shell.bash hook)"\nmodule load cuda; mkdir -p out\n{RUN}',
        f"unset OTHER\nunset -v SOME\n{RUN} 2>&1 | tee log.txt",
        f"MICRO=1\ncd x && {RUN.replace('$MICRO', '4')}",
        f"[ -d out ] || mkdir out\n{RUN} --seed 1 &> log & wait",
        f"export MICRO=2\nMICRO=4\n{RUN}",
    ],
)
def test_commands_that_set_nothing_may_stand_around(script):
    assert launch_of(f"MICRO=4\n{script}\n").script.facts["micro"].value == 4


def test_options_that_are_there_if_a_variable_is_set_are_refused():
    script = "torchrun t.py ${MICRO:+--per_device_train_batch_size $MICRO}\n"
    with pytest.raises(ConfigError, match=r"MICRO.* is known only once the script runs"):
        launch_of(script)


def test_a_carriage_return_is_a_letter_as_for_a_shell():
    script = "BATCH=4\rtorchrun --nproc_per_node 4 train.py --micro_batch_size $BATCH\r"
    with pytest.raises(ConfigError, match="no launch commands"):
        launch_of(script)


def test_a_base_of_a_number_is_not_read():
    (command,) = commands_of("x.sh", "launch $((8#20))")
    assert command.words == ("launch", "$((8#20))")


def test_conda_may_run_a_launcher():
    launch = launch_of("conda run -n x torchrun --nproc_per_node 4 t.py\n")
    assert launch.statement.facts["devices"].value == 4


@pytest.mark.parametrize("option", ["nnode=2", "nproc_per 4", "nproc-per=4"])
def test_the_beginning_of_a_count_is_refused(option):
    """torchrun takes it for the count."""
    with pytest.raises(ConfigError, match=r"x.sh:1: cannot tell what is counted: --n.* may be n"):
        launch_of(f"torchrun --nproc_per_node 8 --{option} t.py\n")


@pytest.mark.parametrize(
    "arguments",
    [
        "--micro_batch_size 2 --run_name micro_batch_size=8",
        "--micro_batch_size 2 --tags a micro_batch_size=8",
        "--wandb_tags gradient_accumulation_steps=16 --micro_batch_size 2",
    ],
)
def test_a_value_that_looks_like_an_argument_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"x.sh:1: cannot tell whether .*=.* is an argument"):
        launch_of(f"torchrun --nproc_per_node 4 t.py {arguments}\n")
    for others in ("micro_batch_size=8 --x y", "--x=y micro_batch_size=8", "--x y -b micro=8"):
        assert launch_of(f"torchrun --nproc_per_node 4 t.py {others}\n")
    flags = {"micro_batch_size": "micro_batch_size"}
    own = launch_of("torchrun t.py --x micro_batch_size=8\n", flags)
    assert own.script.facts["micro"].value == 8


def test_a_quotation_that_is_not_closed_is_named():
    with pytest.raises(ConfigError, match=r'x.sh: line 2 has " without its end'):
        launch_of('X=1\ntorchrun "a.py\n')
    with pytest.raises(ConfigError, match=r"x.sh: line 1 has \("):
        launch_of("A=(1 2\ntorchrun a.py\n")


def test_wide_characters_are_read_as_they_are():
    for wide in ("训练", "😀", "ÿ", "\U0010fffd"):
        script = f"X={wide}\nlaunch {wide}.py \"a {wide} b\" '{wide}' $X  # {wide}"
        (command,) = commands_of("x.sh", script)
        assert command.words == ("launch", f"{wide}.py", f"a {wide} b", wide, wide)
