#!/usr/bin/env bash
# configs/recipes/grpo_math_1b.yaml on 2 nodes; written by `nemo-rl launch slurm`, to be run in the repository's root.
set -euo pipefail
export COMMAND='"$PYTHON" -m nemo_rl.cli.main launch ray --address auto -- configs/recipes/grpo_math_1b.yaml cluster.num_nodes=2'
export LOG_DIR=/shared/logs
export GPUS_PER_NODE=8
export CPUS_PER_NODE=17
export CONTAINER='/images/nemo rl.sqsh'
export MOUNTS=/data:/data
export SETUP_COMMAND='source env.sh && ulimit -n 65536'
mkdir -p -- /shared/logs
sbatch --nodes=2 --cpus-per-task=64 --gpus-per-node=8 --no-requeue --output=/shared/logs/slurm-%j.log --account=me --partition=h100 '--job-name=math 1b' --qos=high ray.sub
