torchrun --nproc_per_node 2 run_clm.py args.json
