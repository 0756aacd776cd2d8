python -u -m paddle.distributed.launch --gpus "0,1,2,3" --log_dir log run_finetune.py \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --output_dir out
