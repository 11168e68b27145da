#!/bin/sh
# Trains, and starts all ranks again after a failure, from the newest whole checkpoint.
#
#     examples/restart/with_torchrun.sh CHECKPOINTS NPROC [arguments of train_lm.py]
#
# On several nodes run it on each of them, with RDZV set to the host and port of one: RDZV=host0:29400 NNODES=2.
# Where the name of a host is a loopback address for itself (`hostname -i`), torchrun needs more: LOCAL_ADDR, the address
# by which the others reach it, and IS_HOST, 1 on the node of RDZV and 0 on the others.
# A rank that cannot go on because another one is lost ends with exit status 75, its first line names the other one,
# and torchrun starts all ranks anew, on all nodes.
set -eu
# A fresh store for each attempt: from an old one gloo may read addresses of ranks that are gone, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
checkpoints=$1 nproc=$2
shift 2
here=$(dirname "$0")
exec torchrun --nnodes "${NNODES:-1}" --nproc_per_node "$nproc" --max-restarts "${MAX_RESTARTS:-3}" \
    ${IS_HOST:+--rdzv-conf is_host=$IS_HOST} ${LOCAL_ADDR:+--local-addr $LOCAL_ADDR} \
    --rdzv-backend c10d --rdzv-endpoint "${RDZV:-localhost:0}" \
    "${SCRIPT:-$here/../train_lm.py}" --save "$checkpoints" --save-interval "${SAVE_INTERVAL:-10}" --resume "$@"
