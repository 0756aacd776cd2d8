python -m torch.distributed.launch --nproc_per_node 4 run_glue.py --do_train \
    --per_gpu_train_batch_size 32 --gradient_accumulation_steps 1 --per_gpu_eval_batch_size 64
