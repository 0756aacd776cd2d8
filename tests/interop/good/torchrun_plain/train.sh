GLOBAL=128
MICRO=4
GPUS=${GPUS:-8}
export OMP_NUM_THREADS=1
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 torchrun --standalone --nproc_per_node $GPUS train.py \
    --micro_batch_size $MICRO --gradient_accumulation_steps $((GLOBAL / MICRO / GPUS)) \
    --global_batch_size $GLOBAL > log.txt 2>&1 &
