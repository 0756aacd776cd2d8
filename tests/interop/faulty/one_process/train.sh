accelerate launch --cpu --num_processes 2 train.py --train_batch_size 4 --gradient_accumulation_steps 2
