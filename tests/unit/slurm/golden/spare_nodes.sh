#!/usr/bin/env bash
# configs/grpo_sort_cpu.yaml on 3 nodes; written by `nemo-rl launch slurm`, to be run in the repository's root.
set -euo pipefail
export COMMAND='"$PYTHON" -m nemo_rl.cli.main launch ray --address auto -- configs/grpo_sort_cpu.yaml cluster.num_nodes=2 cluster.spare_nodes=1'
export LOG_DIR=slurm_logs
export GPUS_PER_NODE=0
export CPUS_PER_NODE=5
export PRELOAD='nemo_rl.models.policy.workers.launch nemo_rl.models.policy.workers.dtensor_engine nemo_rl.models.generation.torch_engine.worker tensordict'
export SPARE_NODES=1
mkdir -p -- slurm_logs
sbatch --no-kill --nodes=3 --cpus-per-task=5 --no-requeue --output=slurm_logs/slurm-%j.log ray.sub
