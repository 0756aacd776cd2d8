#!/bin/bash
set -euo pipefail
cd "$(dirname "$0")"
deepspeed --num_nodes 2 --num_gpus 8 --master_port $PORT train.py --deepspeed --deepspeed_config ds.json
