#!/bin/sh
# Site a: a DeepSpeed job of its own.  Start it again with the same command if it was killed; it joins the others.
set -eu
here=$(dirname "$0")
exec deepspeed --num_gpus "${RANKS:-2}" --master_port "${MASTER_PORT:-29511}" "${SCRIPT:-$here/train.py}" \
    --deepspeed_config "${CONFIG:-$here/site_a.json}" "$@"
