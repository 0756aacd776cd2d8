torchrun --nproc_per_node 4 run_clm.py --deepspeed ds.json --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 --bf16 --output_dir out
