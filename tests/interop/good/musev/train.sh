MICRO=7
ARGS=(
  --train_batch_size $MICRO        # of each device
  --gradient_accumulation_steps 2
  --mixed_precision "fp16"
)
accelerate launch --config_file accelerate.yaml --machine_rank $RANK train_stage_1.py "${ARGS[@]}"
