accelerate launch --multi_gpu --num_processes 4 -m axolotl.cli.train config.yml
