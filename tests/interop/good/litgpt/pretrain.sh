litgpt pretrain pythia-14m --config config.yaml --devices 4 --train.micro_batch_size 8
