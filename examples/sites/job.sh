#!/bin/bash
# One site as a Slurm job: HYBRIDEP_SITE=a sbatch examples/sites/job.sh
# As it is, it starts two CPU ranks on one node.  docs/sites.md, "Slurm", says what to change.
#SBATCH --job-name=site
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
##SBATCH --gpus-per-node=8
##SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=${MASTER_PORT:-29500}
exec srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python "${SCRIPT:-examples/sites/train.py}" \
        --deepspeed_config "${CONFIG:-examples/sites/site_$HYBRIDEP_SITE.json}" "$@"
' - "$@"
