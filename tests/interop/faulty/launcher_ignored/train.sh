accelerate launch --config_file accelerate.yaml --gradient_accumulation_steps 4 train.py \
    --train_batch_size 8 --gradient_accumulation_steps 1
