# SPDX-License-Identifier: Apache-2.0
"""examples/train_lm.py, in which one rank is killed: once, while it saves a checkpoint.

FAULT_FILE: made by the rank that is killed, so that it happens once.  FAULT_RANK, FAULT_STEP: which, and when.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see tests/support/pool_preload.py
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
_save, _engine_save = torch.save, deepspeed.DeepSpeedEngine.save_checkpoint
_saving = [0]


def save_checkpoint(engine, *args, **kwargs):
    _saving[0] = engine.global_steps
    return _engine_save(engine, *args, **kwargs)


def save(*args, **kwargs):
    fault = os.environ.get("FAULT_FILE")
    if fault and os.environ["RANK"] == os.environ["FAULT_RANK"] and _saving[0] >= int(os.environ["FAULT_STEP"]):
        if not Path(fault).exists():
            Path(fault).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return _save(*args, **kwargs)


torch.save, deepspeed.DeepSpeedEngine.save_checkpoint = save, save_checkpoint
runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"), run_name="__main__")
