"""Sets of real files: each faulty one is found with its message, each good one passes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from batchscape.cli import main
from batchscape.errors import ConfigError
from batchscape.interop.check import Consistency, check_configs

HERE = Path(__file__).parent
CONFIGS = (".json", ".yaml")

# Folder: the rules that find it, with words of their messages.
FAULTY = {
    "auto_alone": {"auto-without-source": "DeepSpeed itself takes numbers only"},
    "both_precisions": {"precision": "fp16 and bf16 are both on"},
    "clipping": {"clipping": "gradient_clipping 0.5 is not"},
    "deepspeed_product": {"global-batch": "= 32"},
    "deepspeed_remainder": {"global-batch": "18 / 4 leaves 2"},
    "fields_of_the_json": {"fields-of-the-json": "gradient_accumulation_steps, mixed_precision"},
    "launcher_ignored": {"accumulation": "no effect"},
    "launcher_overrides": {"accumulation": "the launcher's goes before the script's"},
    "litgpt_devices": {"litgpt-floor": "trains with 504"},
    "litgpt_floor": {"litgpt-floor": "trains with 16"},
    "machines": {"processes-per-machine": "starts 3 on each, 6 in all"},
    "missing_accumulation": {"accumulation-missing": "then 1 for DeepSpeed"},
    "one_process": {"one-process": "--cpu starts the script once"},
    "one_process_in_file": {"one-process": "distributed_type NO starts the script once"},
    "precision": {"precision": "bf16.enabled is true, and"},
    "same_name": {"global-batch": "train_batch_size is the global batch in a DeepSpeed JSON"},
    "shell_floor": {"shell-floor": "25 / 8 = 3, remainder 1"},
    "split_batches": {"split-batches": "does not divide over devices 4"},
    "trainer_accumulation": {"accumulation": "gradient_accumulation_steps 8 is not"},
    "trainer_default_micro": {"global-batch": "per_device_train_batch_size 8 (default)"},
    "trainer_micro": {"micro-batch": "train_micro_batch_size_per_gpu 4 is not"},
    "trainer_total": {"global-batch": "= 128"},
    "unread_arguments": {"micro-batch": "does not name the file", "accumulation": "does not name"},
    "unread_config": {"unread-config": "num_processes 8 is not"},
    "visible": {"visible-devices": "names 2 devices"},
}
# Folder: devices x micro-batch x accumulation, worked out by hand.
GOOD = {
    "accelerate_deepspeed": (4, 8, 4),
    "accelerate_plugin": (8, 7, 2),
    "deepspeed_alone": (8, 2, 4),
    "deepspeed_launcher": (16, 2, 2),
    "litgpt": (4, 8, 16),
    "llama_alpaca": (8, 1, 8),
    "musev": (16, 7, 2),
    "torchrun_plain": (8, 4, 4),
    "trainer_file": (2, 4, 2),
    "trainer_numbers": (4, 4, 8),
}


def given_files(folder: Path) -> list[Path]:
    """The script, which names the others; where it does not, or there is none, all files."""
    scripts = sorted(folder.glob("*.sh"))
    if scripts and not folder.name.startswith("unread_"):
        return scripts
    return sorted(folder.iterdir())


def errors_of(checked: Consistency) -> dict[str, str]:
    return {found.rule: found.message for found in checked.findings if found.severity == "error"}


def test_every_set_is_tested() -> None:
    assert {path.name for path in (HERE / "faulty").iterdir()} == set(FAULTY)
    assert {path.name for path in (HERE / "good").iterdir()} == set(GOOD)


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_set_is_found_and_nothing_else(name: str) -> None:
    found = errors_of(check_configs(given_files(HERE / "faulty" / name)))
    assert found.keys() == FAULTY[name].keys()
    for rule, words in FAULTY[name].items():
        assert words in found[rule]


@pytest.mark.parametrize("name", FAULTY)
def test_no_advice_lets_a_flag_decide(name: str) -> None:
    """Behind "auto" in a DeepSpeed JSON stands whatever a command line says."""
    for found in check_configs(given_files(HERE / "faulty" / name)).findings:
        assert "auto" not in found.fix


@pytest.mark.parametrize("name", GOOD)
def test_a_good_set_passes_with_its_geometry(name: str) -> None:
    checked = check_configs(given_files(HERE / "good" / name))
    assert errors_of(checked) == {}
    geometry = checked.running.geometry
    assert geometry is not None
    parts = (
        geometry.data_parallel_size,
        geometry.micro_batch_size,
        geometry.gradient_accumulation_steps,
    )
    assert parts == GOOD[name]


@pytest.mark.parametrize("name", [*FAULTY, *GOOD])
def test_the_order_of_files_does_not_matter(name: str) -> None:
    folder = HERE / ("faulty" if name in FAULTY else "good") / name
    forward = check_configs(sorted(folder.iterdir()))
    backward = check_configs(sorted(folder.iterdir(), reverse=True))
    assert forward.findings == backward.findings
    assert forward.running.geometry == backward.running.geometry


def test_a_named_file_is_found_beside_the_script_from_anywhere(tmp_path, monkeypatch) -> None:
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


def test_the_command_may_follow_the_files(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 64, "gradient_accumulation_steps": "auto"}')
    command = ["torchrun", "--nproc_per_node", "8", "run_clm.py", "--deepspeed", "ds.json"]
    command += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps"]
    assert main(["check-config", "ds.json", "--", *command, "4"]) == 0
    assert "They agree: devices x micro-batch x accumulation = 8 x 2 x 4 = 64." in (
        capsys.readouterr().out
    )
    assert main(["check-config", "--json", "--", *command, "2"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["consistent"] is False
    assert told["geometry"]["global_batch_size"] == 32
    assert [found["rule"] for found in told["findings"]] == ["global-batch"]
    assert told["says"][0]["devices"] == {
        "key": "nproc_per_node",
        "value": 8,
        "default": False,
    }
    assert [entry["kind"] for entry in told["says"]] == ["launcher", "trainer", "deepspeed"]


def test_devices_may_be_told(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    assert check_configs([path]).running.geometry is None
    geometry = check_configs([path], devices=4).running.geometry
    assert geometry is not None
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


DEEP = 100_000
HUGE = f"0x{'f' * 6000}"
NOT_READ = {
    "deep.json": ('{"train": ' + "[" * DEEP + "]" * DEEP + "}", "nested too deeply"),
    "deep.yaml": ("train: " + "[" * 500 + "]" * 500, "nested too deeply"),
    "deep.sh": (f"torchrun t.py --x $(({'(' * 5000}1{')' * 5000}))", "nested too deeply"),
    "huge.yaml": (f"per_device_train_batch_size: {HUGE}", "ints that are too long to print"),
    "list.yaml": (f"per_device_train_batch_size: [{HUGE}]", "ints that are too long to print"),
    "number.yaml": (f"output_dir: x\nmax_grad_norm: {HUGE}", "ints that are too long to print"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_python_itself_cannot_read_or_print_is_one_sentence(name: str, tmp_path) -> None:
    text, words = NOT_READ[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        check_configs([path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x\0.json", "x\0.sh"])
def test_a_path_that_no_system_takes_is_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'x.x00\.\w+': cannot be read \("):
        check_configs([Path(name)])


def test_what_is_not_determined_is_said(tmp_path, capsys) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\n")
    assert main(["check-config", str(path)]) == 0
    assert "not determined: nothing here tells devices (add --devices N" in (
        capsys.readouterr().out
    )


WARNINGS = {
    "schedule-per-process": (
        "accelerate launch --multi_gpu --num_processes 8 train.py --train_batch_size 4 "
        "--gradient_accumulation_steps 1 --lr_scheduler cosine --lr_warmup_steps 500"
    ),
    "auto-find-batch-size": (
        "torchrun --nproc_per_node 2 run.py --per_device_train_batch_size 4 --auto_find_batch_size"
    ),
    "one-process": "accelerate launch --num_processes 8 train.py --train_batch_size 4",
}


@pytest.mark.parametrize("rule", WARNINGS)
def test_a_trap_is_a_warning_and_no_failure(rule: str) -> None:
    checked = check_configs([], WARNINGS[rule].split())
    assert checked.is_consistent
    assert [found.rule for found in checked.findings] == [rule]
    without = WARNINGS[rule].replace("8 train", "1 train").replace(" --auto_find_batch_size", "")
    assert check_configs([], without.split()).findings == ()


@pytest.mark.parametrize("option", ["--lr_scheduler cosine", "--lr_warmup_steps 500"])
def test_a_schedule_is_a_trap_with_either_of_its_parts(option: str) -> None:
    command = f"accelerate launch --multi_gpu --num_processes 8 t.py --train_batch_size 4 {option}"
    assert [found.rule for found in check_configs([], command.split()).findings] == [
        "schedule-per-process"
    ]


def test_the_nearest_global_batches_of_litgpt_are_named() -> None:
    command = "litgpt pretrain x --devices 3 --train.micro_batch_size 4 --train.global_batch_size"
    (found,) = check_configs([], [*command.split(), "100"]).findings
    assert found.fix == "set train.global_batch_size to 96 or 108"
    (found,) = check_configs([], [*command.split(), "11"]).findings
    assert found.fix == "set train.global_batch_size to 12"


def test_split_batches_cuts_the_batch_of_the_arguments(tmp_path) -> None:
    path = tmp_path / "args.json"
    path.write_text(
        '{"per_device_train_batch_size": 8, "accelerator_config": {"split_batches": true}}'
    )
    checked = check_configs([path], devices=4)
    assert checked.is_consistent
    assert [found.rule for found in checked.findings] == ["split-batches"]
    assert checked.running.geometry is not None
    assert checked.running.geometry.global_batch_size == 8


def test_a_count_in_two_places_is_a_warning(tmp_path) -> None:
    shutil.copytree(HERE / "good" / "musev", tmp_path / "set")
    file = str(tmp_path / "set" / "accelerate.yaml")
    command = ["accelerate", "launch", "--num_processes", "8", "train.py", "--train_batch_size=7"]
    checked = check_configs([], [*command[:2], "--config_file", file, *command[2:]])
    assert [found.rule for found in checked.findings] == ["devices"]
    assert checked.running.devices is not None
    assert checked.running.devices.value == 8


UNREADABLE = {
    "x.json": ('{"train_batch_size": 4,}', "x.json: no valid JSON: .*line 1"),
    "twice.json": ('{"fp16": {}, "fp16": {}}', "key 'fp16' is given twice"),
    "list.json": ("[1]", "is a mapping of keys to values"),
    "empty.yaml": ("", "is a mapping of keys to values"),
    "x.yaml": ("a: [1", "x.yaml: no valid YAML: .*line"),
    "tab.yaml": ("a:\n\t- 1", "no valid YAML"),
    "date.yaml": ("train_batch_size: 2020-13-45", "no valid YAML: month must be"),
    "other.json": ('{"a": 1}', "cannot tell what file this is"),
    "text.json": ('{"train_batch_size": "many"}', "train_batch_size must be an int .*'many'"),
    "quoted.json": ('{"train_batch_size": "32"}', "train_batch_size must be an int .*'32'"),
    "negative.json": ('{"train_batch_size": -4}', "from 1 to .* given -4"),
    "zero.json": ('{"gradient_accumulation_steps": 0}', "from 1 to .* given 0"),
    "half.json": ('{"train_batch_size": 4.5}', "must be an int .* given 4.5"),
    "true.json": ('{"train_batch_size": true}', "must be an int .* given True"),
    "section.json": ('{"fp16": true, "zero_optimization": {}}', "fp16 must be a mapping"),
    "enabled.json": ('{"fp16": {"enabled": "often"}}', "enabled must be true or false"),
    "clip.json": ('{"gradient_clipping": -1}', "gradient_clipping must be a number of at least 0"),
    "nan.json": ('{"gradient_clipping": NaN}', "gradient_clipping must be a number of at least 0"),
    "tp.json": (
        '{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}',
        "only data parallelism is covered",
    ),
    "no.yaml": (
        "distributed_type: 'NO'\nmixed_precision: no\n",
        "in YAML no without quotes means false",
    ),
    "megatron.yaml": ("distributed_type: MEGATRON_LM\n", "only data parallelism is covered"),
    "none.sh": ("echo hello\n", "no launch command found"),
    "two.sh": ("torchrun a.py\ntorchrun b.py\n", r"2 launch commands \(lines 1, 2\)"),
    "quote.sh": ('torchrun "a.py\n', 'what " begins in line 1 is not closed; give'),
    "unset.sh": (
        "torchrun --nproc_per_node $GPUS a.py\n",
        r"--nproc_per_node is \$\{GPUS\}, which only running the script would tell",
    ),
    "elastic.sh": ("torchrun --nnodes 1:4 a.py\n", "lets the number of nodes change"),
    "word.sh": ("torchrun --nproc_per_node two a.py\n", "nproc_per_node must be an int"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_said_in_one_line(name: str, tmp_path, capsys) -> None:
    text, words = UNREADABLE[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_configs([path])
    assert main(["check-config", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_bytes_folders_and_nothing_are_refused(tmp_path) -> None:
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
    with pytest.raises(ConfigError, match="no launch command"):
        check_configs([], ["ls"])
    script = tmp_path / "a.sh"
    script.write_text("torchrun a.py\n")
    with pytest.raises(ConfigError, match="one launch command at a time"):
        check_configs([script], ["torchrun", "a.py"])
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match="are both a DeepSpeed JSON"):
        check_configs([tmp_path / "a.json", tmp_path / "b.json"])


def test_a_misspelt_key_of_a_deepspeed_json_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    content = {"train_batchsize": 64, "train_micro_batch_size_per_gpu": 2, "my_own_note": 1}
    path.write_text(json.dumps(content))
    found = check_configs([path], devices=8).findings
    assert [(each.rule, each.severity) for each in found] == [("unknown-key", "warning")]
    assert "no key train_batchsize" in found[0].message
    assert "train_batch_size" in found[0].fix


def test_two_files_of_a_kind_are_named_in_words(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match="are both an accelerate config;"):
        check_configs([tmp_path / "a.yaml", tmp_path / "b.yaml"])
