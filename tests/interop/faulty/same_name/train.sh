accelerate launch --config_file accelerate.yaml train_stage_1.py --train_batch_size 4 \
    --gradient_accumulation_steps 2
