torchrun --standalone --nproc_per_node=8 -m scripts.base_train --device-batch-size=32 --max-seq-len=2048 --total-batch-size=1048576
