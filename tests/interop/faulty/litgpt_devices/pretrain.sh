litgpt pretrain pythia-14m --config config.yaml --devices 3
