python -m torch.distributed.run --standalone --nproc_per_node=4 run_clm.py --bf16 True \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --deepspeed ds.json --output_dir o
