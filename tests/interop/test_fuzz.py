"""Whatever the files hold: an answer or a message, and never a traceback."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchscape.errors import ConfigError
from batchscape.interop.check import check_configs

KEY_NAMES = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    fp16 bf16 enabled gradient_clipping zero_optimization optimizer params max_grad_norm
    tensor_parallel autotp_size
    per_device_train_batch_size output_dir accelerator_config split_batches deepspeed max_steps
    distributed_type num_processes num_machines mixed_precision deepspeed_config gpu_ids use_cpu
    deepspeed_config_file mpirun_config parallelism_config tp_size train devices num_nodes
    global_batch_size micro_batch_size auto_find_batch_size
    batch_size base_model datasets train_dataset model _component_ batching_strategy"""
KEYS = st.sampled_from(KEY_NAMES.split())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "NO", "MULTI_GPU", "DEEPSPEED", "fp16", "bf16", "no", "1e-3", "0,1"]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
CONTENT = st.dictionaries(KEYS, VALUES, max_size=8)
PIECES = r"""
    torchrun accelerate launch deepspeed python litgpt pretrain -m torch.distributed.run t.py
    --nproc_per_node --nnodes --num_processes --num_machines --cpu --multi_gpu --num_gpus --include
    --per_device_train_batch_size --gradient_accumulation_steps --train_batch_size --fp16 --bf16
    --global_batch_size --deepspeed --mixed_precision --max_grad_norm --devices
    --train.micro_batch_size --train.global_batch_size --use_deepspeed --gradient_clipping
    0 1 2 8 -1 x 1:2 auto gpu a:0,1 $X $((8/3)) ${Y:-4} fp16 = "" ' " \\ # ; && | ( ) A=( X=2"""
WORDS = st.sampled_from([*PIECES.split(), "\n"])
LAX = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def survives(files, command=(), devices=None):
    try:
        checked = check_configs(files, command, devices=devices)
    except ConfigError:
        return
    json.loads(checked.as_json())
    checked.as_table()
    geometry = checked.running.geometry
    if geometry is not None:
        assert geometry.global_batch_size >= 1


@pytest.mark.slow
@settings(LAX, max_examples=60)
@given(content=CONTENT, other=CONTENT, devices=st.none() | st.integers(1, 9))
def test_any_settings(tmp_path, content, other, devices):
    first, second = tmp_path / "first.json", tmp_path / "second.yaml"
    first.write_text(json.dumps(content))
    second.write_text(yaml.safe_dump(other, allow_unicode=True))
    survives([first], devices=devices)
    survives([first, second], devices=devices)
    survives([first, second], ("torchrun", "--nproc_per_node", "2", "t.py"), devices=devices)
    survives([first, second], ("accelerate", "launch", "--num_processes", "2", "t.py"))


@pytest.mark.slow
@LAX
@given(words=st.lists(WORDS | st.text(max_size=4), max_size=14))
def test_any_command(tmp_path, words):
    survives([], tuple(words) or ("x",))
    path = tmp_path / "file.sh"
    path.write_text(" ".join(words), encoding="utf-8", errors="replace")
    survives([path])
