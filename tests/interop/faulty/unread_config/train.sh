torchrun --nproc_per_node 4 train.py --train_batch_size 7 --gradient_accumulation_steps 2
