"""The settings of one geometry in the configuration files of training systems."""

from __future__ import annotations

from batchscape.geometry import BatchGeometry


def config_values(geometry: BatchGeometry) -> dict[str, dict[str, int]]:
    """Write one geometry in the keys of each system.

    Returns
    -------
    dict
        Keys and values by system. Any two that disagree train another batch than was chosen.

    Notes
    -----
    Sources: DeepSpeed, https://www.deepspeed.ai/docs/config-json/ (train_batch_size is the product
    of the other two and the number of devices, else it refuses); transformers
    `TrainingArguments`; accelerate `launch` (num_processes counts those of all machines) and
    `Accelerator`; LitGPT `litgpt.args.TrainArgs` (global_batch_size counts all devices, devices
    those of one node).
    """
    batch, nodes = geometry.global_batch_size, geometry.nodes
    ranks, micro_batch_size = geometry.data_parallel_size, geometry.micro_batch_size
    accumulation = {"gradient_accumulation_steps": geometry.gradient_accumulation_steps}

    def of_nodes(name: str) -> dict[str, int]:
        return {name: nodes} if nodes > 1 else {}

    return {
        "DeepSpeed JSON": {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            **accumulation,
        },
        "HF TrainingArguments": {"per_device_train_batch_size": micro_batch_size, **accumulation},
        "accelerate": {**of_nodes("num_machines"), "num_processes": ranks, **accumulation},
        "LitGPT": {
            **of_nodes("num_nodes"),
            "devices": geometry.devices_per_node,
            "train.global_batch_size": batch,
            "train.micro_batch_size": micro_batch_size,
        },
        "torchrun": {**of_nodes("nnodes"), "nproc_per_node": geometry.devices_per_node},
        "batchscape": {
            **of_nodes("batch.nodes"),
            "batch.data_parallel_size": ranks,
            "batch.micro_batch_size": micro_batch_size,
            **{f"batch.{name}": value for name, value in accumulation.items()},
        },
    }
