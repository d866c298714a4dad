#!/usr/bin/env bash
# configs/grpo_sort_cpu.yaml on 1 nodes; written by `nemo-rl launch slurm`, to be run in the repository's root.
set -euo pipefail
export COMMAND='"$PYTHON" -m nemo_rl.cli.main launch ray --address auto -- configs/grpo_sort_cpu.yaml checkpointing.resume=true checkpointing.must_save_by=1:00:00'
export LOG_DIR=slurm_logs
export GPUS_PER_NODE=0
export CPUS_PER_NODE=7
export REQUEUE=1
export PRELOAD='nemo_rl.models.policy.workers.launch nemo_rl.models.policy.workers.dtensor_engine nemo_rl.models.generation.torch_engine.worker tensordict'
mkdir -p -- slurm_logs
sbatch --nodes=1 --cpus-per-task=7 --requeue --output=slurm_logs/slurm-%j.log --time=9 ray.sub
