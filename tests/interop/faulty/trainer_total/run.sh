NPROC=8
MICRO=2
torchrun --nproc-per-node=$NPROC run_clm.py --deepspeed=ds.json --per_device_train_batch_size=$MICRO \
  --gradient_accumulation_steps=8 --output_dir out 2>&1 | tee log.txt
