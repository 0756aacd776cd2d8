GLOBAL=100
MICRO=4
GPUS=8
torchrun --nproc_per_node $GPUS run_clm.py --per_device_train_batch_size $MICRO \
    --gradient_accumulation_steps $((GLOBAL / MICRO / GPUS)) --output_dir out
