#!/bin/bash
# On every host of the job, the same line: HEAD=host0 NODES=2 bash torchrun.sh train.py --flags
set -euo pipefail
export TPCORE_TIMEOUT="${TPCORE_TIMEOUT:-300}" # hosts start at different times
exec torchrun \
    --nnodes="${NODES:?how many hosts}" \
    --nproc_per_node="${PER_NODE:-8}" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="${HEAD:?the name of one of the hosts}:${PORT:-29500}" \
    --rdzv_id="${JOB:-tpcore}" \
    "$@"
