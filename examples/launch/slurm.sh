#!/bin/bash
# sbatch slurm.sh train.py --flags
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export HEAD NODES="$SLURM_JOB_NUM_NODES" JOB="$SLURM_JOB_ID"
# sbatch runs a copy of this file: the other one is looked for where the job was submitted
srun bash "${SLURM_SUBMIT_DIR:-.}/torchrun.sh" "$@"
