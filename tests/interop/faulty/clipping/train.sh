torchrun --nproc_per_node 2 run_clm.py --deepspeed ds.json --per_device_train_batch_size 2 --output_dir out
