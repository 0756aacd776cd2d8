torchrun --nproc_per_node 2 run_clm.py --per_device_train_batch_size 8 --gradient_accumulation_steps 1
