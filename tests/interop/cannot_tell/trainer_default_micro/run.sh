# The micro-batch is forgotten, so that it is 8.
torchrun --nproc_per_node 8 run_clm.py --deepspeed ds.json --do_train --output_dir out
