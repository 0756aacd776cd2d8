accelerate launch --config_file accelerate.yaml train.py --train_batch_size 7 \
  --gradient_accumulation_steps 2 --mixed_precision bf16
