GPUS=$(nvidia-smi -L | wc -l)
torchrun --nnodes $NODES --nproc_per_node $GPUS train.py \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4
