CUDA_VISIBLE_DEVICES=0 python run_clm.py --per_device_train_batch_size 8 --gradient_accumulation_steps 4
