"""The values of one geometry as every system that trains must be told them."""

from __future__ import annotations

__all__ = ["config_values"]


def config_values(
    devices: int, micro_batch_size: int, gradient_accumulation_steps: int
) -> dict[str, dict[str, int]]:
    """Write one geometry in the keys of each system; all devices in one machine.

    Returns
    -------
    dict
        Keys and values by system. Any two that disagree train another batch than was chosen.

    Notes
    -----
    Sources: DeepSpeed, https://www.deepspeed.ai/docs/config-json/ (train_batch_size is the product
    of the other two and the number of devices, else it refuses); transformers
    `TrainingArguments`; accelerate `launch` and `Accelerator`; LitGPT `litgpt.args.TrainArgs`
    (global_batch_size counts all devices).
    """
    batch = devices * micro_batch_size * gradient_accumulation_steps
    return {
        "DeepSpeed JSON": {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        },
        "HF TrainingArguments": {
            "per_device_train_batch_size": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        },
        "accelerate": {
            "num_processes": devices,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        },
        "LitGPT": {
            "devices": devices,
            "train.global_batch_size": batch,
            "train.micro_batch_size": micro_batch_size,
        },
        "torchrun": {"nproc_per_node": devices},
        "batchscape": {
            "batch.data_parallel_size": devices,
            "batch.micro_batch_size": micro_batch_size,
            "batch.gradient_accumulation_steps": gradient_accumulation_steps,
        },
    }
