#!/bin/bash
torchrun --nproc_per_node 8 run_clm.py \
    --deepspeed ds.json \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --output_dir out
