#!/bin/sh
# The same with DeepSpeed's launcher, which does not start ranks again itself.
#
#     examples/restart/with_deepspeed.sh CHECKPOINTS [arguments of deepspeed] -- [arguments of train_lm.py]
#
# Run it on the node where `deepspeed` is run; with a hostfile the launcher starts the ranks of the others over ssh, and
# ends them when one has failed.
set -eu
checkpoints=$1
shift
launcher=""
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    launcher="$launcher $1"
    shift
done
[ $# -gt 0 ] && shift
here=$(dirname "$0")
attempt=0
while :; do
    # shellcheck disable=SC2086  # arguments of the launcher hold no spaces
    if deepspeed $launcher "${SCRIPT:-$here/../train_lm.py}" \
        --save "$checkpoints" --save-interval "${SAVE_INTERVAL:-10}" --resume "$@"; then
        exit 0
    else
        status=$?
    fi
    attempt=$((attempt + 1))
    if [ "$attempt" -gt "${MAX_RESTARTS:-3}" ]; then
        echo "ended with status $status after $attempt attempts" >&2
        exit "$status"
    fi
    echo "ended with status $status; attempt $((attempt + 1)) follows in ${PAUSE_S:-5} s" >&2
    sleep "${PAUSE_S:-5}"
done
