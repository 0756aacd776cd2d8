"""Sets of real files: each faulty one is found with its message, each good one passes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from batchscape.cli import main
from batchscape.errors import ConfigError
from batchscape.interop.check import check_configs

HERE = Path(__file__).parent
SETS = sorted(
    path for kind in ("good", "faulty", "cannot_tell") for path in (HERE / kind).iterdir()
)


def answer_of(folder):
    """The right answer, worked out by hand: it stands beside what is to be checked."""
    return yaml.safe_load((folder / "answer.yaml").read_text(encoding="utf-8"))


def given_files(folder):
    """The script, which names the others; where it does not, or there is none, all files."""
    scripts = sorted(folder.glob("*.sh"))
    return scripts if scripts and not folder.name.startswith("unread_") else all_files(folder)


def all_files(folder):
    return sorted(path for path in folder.iterdir() if path.name != "answer.yaml")


def check(folder, files):
    answer = answer_of(folder)
    return check_configs(files, devices=answer.get("devices"), flags=answer.get("flags", ()))


def verdict_of(checked):
    return str(checked.as_table().renderables[-1])


def errors_of(checked):
    return {
        finding.rule: finding.message for finding in checked.findings if finding.severity == "error"
    }


@pytest.mark.parametrize("folder", SETS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_every_set_has_its_right_answer(folder):
    answer = answer_of(folder)
    assert answer.keys() & {"geometry", "findings", "reason", "refusal"}, "no answer"
    if "refusal" in answer:
        with pytest.raises(ConfigError, match=re.escape(answer["refusal"])):
            check(folder, given_files(folder))
        return
    checked = check(folder, given_files(folder))
    expected = answer.get("findings", {})
    messages = {finding.rule: finding.message for finding in checked.findings}
    # Warnings may stand beside the errors of a faulty set, and beside those alone.
    assert errors_of(checked).keys() <= expected.keys() <= messages.keys()
    for rule, words in expected.items():
        assert words in messages[rule]
    for finding in checked.findings:
        assert "auto" not in finding.fix, 'behind "auto" stands whatever a command line says'
    if "geometry" in answer:
        assert messages == {}
        assert f"They agree: devices x micro-batch x accumulation = {answer['geometry']}" in (
            verdict_of(checked)
        )
    if "reason" in answer:
        assert f"Cannot tell what would run: {answer['reason']}" in verdict_of(checked)
        assert checked.running.geometry is None


@pytest.mark.parametrize(
    "folder",
    [folder for folder in SETS if folder.parent.name != "cannot_tell"],
    ids=lambda folder: folder.name,
)
def test_the_order_of_files_does_not_matter(folder):
    forward = check(folder, all_files(folder))
    backward = check(folder, all_files(folder)[::-1])
    assert forward.findings == backward.findings
    assert forward.running.geometry == backward.running.geometry


def test_a_named_file_is_found_beside_the_script_from_anywhere(tmp_path, monkeypatch):
    shutil.copytree(HERE / "faulty" / "trainer_total", tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    assert "global-batch" in errors_of(check_configs([Path("set/run.sh")]))
    (tmp_path / "set" / "ds.json").rename(tmp_path / "ds.json")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ds.json").rename(tmp_path / "elsewhere" / "ds.json")
    with pytest.raises(ConfigError, match=r"ds\.json is named as a configuration"):
        check_configs([Path("set/run.sh")])
    both = [Path("set/run.sh"), Path("elsewhere/ds.json")]
    assert "global-batch" in errors_of(check_configs(both))


def test_the_command_may_follow_the_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 64, "gradient_accumulation_steps": "auto"}')
    command = ["torchrun", "--nproc_per_node", "8", "run_clm.py", "--deepspeed", "ds.json"]
    command += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps"]
    assert main(["check-config", "ds.json", "--", *command, "4"]) == 0
    assert "They agree: devices x micro-batch x accumulation = 8 x 2 x 4 = 64." in (
        capsys.readouterr().out
    )
    assert main(["check-config", "--json", "--", *command, "2"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "disagree"
    assert answer["geometry"]["global_batch_size"] == 32
    assert [finding["rule"] for finding in answer["findings"]] == ["global-batch"]
    assert answer["says"][0]["devices"] == {"key": "nproc_per_node", "value": 8}
    assert [entry["kind"] for entry in answer["says"]] == ["launcher", "trainer", "deepspeed"]


def test_the_trainer_may_split_a_batch_over_devices(tmp_path):
    """Of 16 for all 8 devices each has 2; what is not read nobody guesses."""
    path = tmp_path / "args.json"
    content = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    for split, batch in ((False, 256), (True, 32)):
        path.write_text(json.dumps({**content, "accelerator_config": {"split_batches": split}}))
        assert check_configs([path], devices=8).running.geometry.global_batch_size == batch
    assert check_configs([path], devices=3).running.geometry is None, "16 do not divide over 3"
    path.write_text(json.dumps({**content, "accelerator_config": "accelerator.json"}))
    with pytest.raises(ConfigError, match="the name of an accelerator_config, are not read"):
        check_configs([path], devices=8)
    path.write_text(json.dumps({**content, "deepspeed": {"train_batch_size": 4}}))
    with pytest.raises(ConfigError, match="a DeepSpeed JSON within"):
        check_configs([path], devices=8)


def test_a_number_that_is_no_plain_one_is_not_used_and_said():
    for value in ("8.0", "4,8", "1k"):
        command = f"torchrun --nproc_per_node 2 train.py --micro_batch_size 4 --batch_size {value}"
        checked = check_configs([], [*command.split(), "--gradient_accumulation_steps", "1"])
        assert checked.verdict == "cannot tell"
        assert f"batch_size {value}" in checked.findings[0].message


def test_devices_may_be_told(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    assert check_configs([path]).running.geometry is None
    geometry = check_configs([path], devices=4).running.geometry
    assert geometry.gradient_accumulation_steps == 4
    assert "global-batch" in errors_of(check_configs([path], devices=3))
    command = ["torchrun", "--nproc_per_node", "gpu", "train.py", "--deepspeed_config", str(path)]
    assert check_configs([], command).running.geometry is None
    assert check_configs([], command, devices=4).is_consistent
    command[2] = "8"
    assert "devices" in errors_of(check_configs([], command, devices=4))
    for devices in (0, -1, 2**63):
        with pytest.raises(ConfigError, match="devices must be an int"):
            check_configs([path], devices=devices)


CUTS = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context_parallel_size"),
    *("sp_size", "tp", "model_parallel_size", "sequence_parallel_degree", "tensor_parallel_degree"),
    *("ulysses_sequence_parallel_size", "megatron_lm_tp_degree", "parallelism.pp_degree"),
    *("tensor_parallel", "pipeline-model-parallel", "mp", "num_stages", "ulysses_size"),
)


@pytest.mark.parametrize("name", CUTS)
def test_what_cuts_the_model_is_refused_in_files_and_arguments_alike(name, tmp_path):
    """8 devices of which 2 share a sample are 4 data-parallel ranks."""
    batch = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    command = f"torchrun --nproc_per_node 8 t.py {batch}"
    for cut in (f"--{name} 2", f"--{name}=2", f"{name}=2"):
        with pytest.raises(ConfigError, match="only data parallelism is covered"):
            check_configs([], f"{command} {cut}".split())
    with pytest.raises(ConfigError, match="is known only once the script runs"):
        check_configs([], f"{command} --{name} $N".split())
    path = tmp_path / "args.yaml"
    path.write_text(f"per_device_train_batch_size: 4\nparallel:\n  {name}: 2\n")
    with pytest.raises(ConfigError, match=f"{re.escape(name)} 2: the model or a sample"):
        check_configs([path], devices=8)
    for other in (f"--{name} 1", "--vllm_tensor_parallel_size 2", "--expert_parallel_size 2"):
        assert check_configs([], f"{command} {other}".split()).running.geometry is not None


@pytest.mark.parametrize(
    ("argument", "is_of_batch"),
    [
        ("batch_size", True),
        ("batch-size", True),
        ("device_batch_size", True),
        ("total-batch-size", True),
        ("train_batch_size", True),
        ("trainer.accumulate_grad_batches", True),
        ("micro_train_batch_size", True),
        ("bs", True),
        ("update_freq", True),
        ("grad_acc", True),
        ("num_micro_batches", True),
        ("samples_per_gpu", True),
        ("per_device_eval_batch_size", False),
        ("rollout_batch_size", False),
        ("val_batch_size", False),
        ("num_batches", False),
        ("seed", False),
    ],
)
def test_a_number_of_the_batch_that_is_not_used_is_a_finding(argument, is_of_batch):
    command = f"torchrun --nproc_per_node 8 t.py --micro_batch_size 4 --{argument} 2"
    checked = check_configs([], command.split())
    assert [finding.rule for finding in checked.findings] == ["unused-number"] * is_of_batch
    unknown = f"{command[:-1]}$N".split()
    if is_of_batch:
        with pytest.raises(ConfigError, match=r"\$N is known only once the script runs"):
            check_configs([], unknown)
    else:
        assert check_configs([], unknown).findings == ()
    checked = check_configs([], [*command.split(), "--gradient_accumulation_steps", "2"])
    assert ("They agree" in verdict_of(checked)) != is_of_batch
    assert "8 x 4 x 2 = 64" in verdict_of(checked)


def test_a_total_beside_a_length_may_be_tokens():
    command = "torchrun --nproc_per_node 1 t.py --micro_batch_size 4 --max-seq-len 256 --total 512"
    (finding,) = check_configs([], command.split(), flags=["total=global_batch_size"]).findings
    assert (finding.rule, finding.severity) == ("samples-or-tokens", "warning")
    tokens = ["total=global_batch_tokens", "max_seq_len=sequence_length"]
    (finding,) = check_configs([], command.split(), flags=tokens).findings
    assert "2 / 4 leaves 2" in finding.message
    with pytest.raises(ConfigError, match="total 500 tokens are no multiple of max_seq_len 256"):
        check_configs([], [*command.split()[:-1], "500"], flags=tokens)
    unambiguous = command.replace("--total", "--global_batch_size")
    assert check_configs([], unambiguous.split()).findings == ()


NAMES = {
    "torchrun --nproc_per_node 8 t.py --batch_size 32 --gradient_accumulation_steps 2": None,
    "torchrun --nproc_per_node 8 t.py --per_device_train_batch_size 4": None,
    "torchrun --nproc_per_node 8 t.py --do_train --deepspeed": None,
    "torchrun t.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2": None,
    "deepspeed --num_gpus 8 t.py --train_batch_size 32 --gradient_accumulation_steps 1": None,
    "accelerate launch t.py --train_batch_size 4 --gradient_accumulation_steps 2": None,
    "litgpt pretrain x --devices 3": None,
    "litgpt pretrain x --devices 2 --train.global_batch_size 8": None,
    "torchrun --nproc_per_node 8 t.py --micro_batch_size 4 --global_batch_size 64": 64,
    "accelerate launch --cpu t.py --train_batch_size 4 --gradient_accumulation_steps 2": 8,
    "torchrun --nproc_per_node 8 t.py --micro_batch_size 4 --gradient_accumulation_steps 2": 64,
}


@pytest.mark.parametrize("command", NAMES)
def test_what_is_not_stated_is_no_default(command):
    geometry = check_configs([], command.split()).running.geometry
    assert (None if geometry is None else geometry.global_batch_size) == NAMES[command]


COUNTED = "torchrun --nnodes 2 --nproc_per_node $(nvidia-smi -L | wc -l) t.py"
UNCOUNTED = {
    COUNTED: "nproc_per_node",
    "torchrun --nproc_per_node 8 --nnodes $N t.py": "nnodes",
    "accelerate launch --num_processes `count` t.py": "num_processes",
    "deepspeed --num_nodes $N --num_gpus 8 t.py": "num_nodes",
    "deepspeed --include $HOSTS t.py": "include",
    "litgpt pretrain x --devices $N --train.micro_batch_size 4 --train.global_batch_size 128": (
        "devices"
    ),
}


@pytest.mark.parametrize("command", UNCOUNTED)
def test_devices_answers_for_a_count_that_only_running_would_tell(command, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(f"{command} --micro_batch_size 4 --gradient_accumulation_steps 2\n")
    words = f"--{UNCOUNTED[command]} .* is known only once .* add --devices N"
    with pytest.raises(ConfigError, match=words):
        check_configs([path])
    checked = check_configs([path], devices=16)
    assert "16 x 4 x 2 = 128" in verdict_of(checked)


def test_what_is_not_determined_is_said(tmp_path, capsys):
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\n")
    assert main(["check-config", str(path)]) == 0
    problem = (
        "Cannot tell what would run: nothing here states devices (add --devices N), accumulation"
    )
    assert f"{problem} (gradient_accumulation_steps)." in capsys.readouterr().out


WARNINGS = {
    "auto-find-batch-size": (
        "torchrun --nproc_per_node 2 run.py --per_device_train_batch_size 4 --auto_find_batch_size"
    ),
    "one-process": "accelerate launch --num_processes 8 train.py --train_batch_size 4",
}


@pytest.mark.parametrize("rule", WARNINGS)
def test_a_trap_is_a_warning_and_no_failure(rule):
    checked = check_configs([], WARNINGS[rule].split())
    assert checked.is_consistent
    assert [finding.rule for finding in checked.findings] == [rule]
    without = WARNINGS[rule].replace("8 train", "1 train").replace(" --auto_find_batch_size", "")
    assert check_configs([], without.split()).findings == ()


def test_the_nearest_geometries_of_litgpt_are_named():
    """96 and 108 are the nearest that 3 x 4 divides; below one micro-step LitGPT stops."""
    command = "litgpt pretrain x --devices 3 --train.micro_batch_size 4 --train.global_batch_size"
    (finding,) = check_configs([], [*command.split(), "100"]).findings
    assert "trains with 96" in finding.message
    assert "3 x 4 x 8 = 96, 3 x 4 x 9 = 108" in finding.fix
    (finding,) = check_configs([], [*command.split(), "11"]).findings
    assert "stops at an assertion" in finding.message
    assert "3 x 4 x 1 = 12" in finding.fix


DEEP = 100_000
UNREADABLE = {
    "deep.json": ('{"train": ' + "[" * DEEP + "]" * DEEP + "}", "no valid JSON: maximum recursion"),
    "deep.yaml": ("train: " + "[" * 500 + "]" * 500, "no valid YAML: maximum recursion"),
    "deep.sh": (f"torchrun t.py --x $(({'(' * 5000}1{')' * 5000}))", "without its end"),
    "x.json": ('{"train_batch_size": 4,}', "x.json: no valid JSON: .*line 1"),
    "list.json": ("[1]", "is a mapping of keys to values"),
    "empty.yaml": ("", "is a mapping of keys to values"),
    "x.yaml": ("a: [1", "x.yaml: no valid YAML: .*line"),
    "tab.yaml": ("a:\n\t- 1", "no valid YAML"),
    "date.yaml": ("train_batch_size: 2020-13-45", "no valid YAML: month must be"),
    "other.json": ('{"a": 1}', "cannot tell what file this is"),
    # Sizes under `train` are anybody's.
    "train.yaml": (
        "train: {global_batch_size: 64, micro_batch_size: 4}",
        "cannot tell what file this is",
    ),
    "auto.yaml": ("per_device_train_batch_size: auto", "must be an int .*'auto'"),
    "text.json": ('{"train_batch_size": "many"}', "train_batch_size must be an int .*'many'"),
    "quoted.json": ('{"train_batch_size": "32"}', "train_batch_size must be an int .*'32'"),
    "negative.json": ('{"train_batch_size": -4}', "from 1 to .* given -4"),
    "zero.json": ('{"gradient_accumulation_steps": 0}', "from 1 to .* given 0"),
    "half.json": ('{"train_batch_size": 4.5}', "must be an int .* given 4.5"),
    "true.json": ('{"train_batch_size": true}', "must be an int .* given True"),
    "enabled.json": ('{"fp16": {"enabled": "often"}}', "enabled must be true or false"),
    "clip.json": ('{"gradient_clipping": -1}', "gradient_clipping must be a number of at least 0"),
    "nan.json": ('{"gradient_clipping": NaN}', "gradient_clipping must be a number of at least 0"),
    "tp.json": (
        '{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}',
        "only data parallelism is covered",
    ),
    "dynamic.yaml": (
        "train_dataset: x\nmicro_batch_size: 2\nglobal_batch_size: 8\n"
        "batching_strategy: dynamic_batching\n",
        "dynamic_batching fills a batch by tokens",
    ),
    "megatron.yaml": ("distributed_type: MEGATRON_LM\n", "only data parallelism is covered"),
    "none.sh": ("echo hello\n", "no launch commands, and one is read"),
    "two.sh": ("torchrun a.py\ntorchrun b.py\n", r"2 launch commands \(lines 1, 2\)"),
    "quote.sh": ('torchrun "a.py\n', 'line 1 has " without its end, .*; give'),
    "unset.sh": (
        "torchrun --nproc_per_node $GPUS a.py\n",
        r"--nproc_per_node \$\{GPUS\} is known only once the script runs",
    ),
    "elastic.sh": ("torchrun --nnodes 1:4 a.py\n", "lets the number of nodes change"),
    "word.sh": ("torchrun --nproc_per_node two a.py\n", "nproc_per_node must be an int"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_said_in_one_line(name, tmp_path, capsys):
    text, words = UNREADABLE[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        check_configs([path])
    assert "\n" not in str(caught.value)
    assert main(["check-config", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_bytes_folders_and_nothing_are_refused(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.json").write_text(" " * (2**20 + 1))
    (tmp_path / "folder.json").mkdir()
    for name, words in (
        ("bytes.json", "UTF-8"),
        ("large.json", "at most 1048576 bytes"),
        ("folder.json", "cannot be read"),
        ("gone.json", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_configs([tmp_path / name])
    with pytest.raises(ConfigError, match="nothing to check"):
        check_configs([])
    with pytest.raises(ConfigError, match="no launch commands"):
        check_configs([], ["ls"])
    script = tmp_path / "a.sh"
    script.write_text("torchrun a.py\n")
    with pytest.raises(ConfigError, match="give one launch command"):
        check_configs([script], ["torchrun", "a.py"])
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match="both set the batch"):
        check_configs([tmp_path / "a.json", tmp_path / "b.json"])


def test_a_misspelt_key_of_a_deepspeed_json_is_a_warning(tmp_path):
    path = tmp_path / "ds.json"
    content = {"train_batchsize": 64, "train_micro_batch_size_per_gpu": 2, "my_own_note": 1}
    path.write_text(json.dumps(content))
    findings = check_configs([path], devices=8).findings
    assert [(finding.rule, finding.severity) for finding in findings] == [
        ("unknown-key", "warning")
    ]
    assert "no key train_batchsize" in findings[0].message
    assert "train_batch_size" in findings[0].fix


def test_variables_in_front_of_a_command_may_hold_blanks():
    """As a shell hands them on: their quotes are gone."""
    command = ["NOTE=a b", "CUDA_VISIBLE_DEVICES=0, 1", "torchrun", "--nproc_per_node=4", "t.py"]
    assert [finding.rule for finding in check_configs([], command).findings] == ["visible-devices"]


def test_an_option_before_a_shell_is_none_of_its_own():
    command = ["srun", "-c", "8", "bash", "run.sh", "torchrun", "--nproc_per_node=4", "t.py"]
    assert check_configs([], command).setup.launch.statement.facts["devices"].value == 4
