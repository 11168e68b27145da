# SPDX-License-Identifier: Apache-2.0
"""What every worker process needs imported, loaded once by the fork server and inherited by all workers.

Importing torch and deepspeed takes seconds of CPU; on two cores eight workers would pay them one after the other.
Nothing here starts a thread, so forking afterwards is safe.
"""

import ds_hybridep._autoload

# The same hook that the installed entry point runs; it has to be there before deepspeed's engine is imported.
ds_hybridep._autoload.install()

import gc  # noqa: E402
import importlib  # noqa: E402
import logging  # noqa: E402

import deepspeed  # noqa: E402
import hf_models  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import logger  # noqa: E402

# Imported by deepspeed and torch when the first engine of a process is built, and by the modules of tests where a
# worker looks for its function: 2 s in each worker, if not done here.
for _name in (
    "torch._dynamo",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "ds_hybridep.deepspeed.api",
    "hypothesis.strategies",
    "pytest",
    "training",
):
    importlib.import_module(_name)

hf_models.preload()
hf_models.let_plain_autoep_work()

LINEAR = torch.nn.functional.linear

__all__ = ["LINEAR", "deepspeed", "torch"]

logger.setLevel(logging.ERROR)

# On CPU deepspeed compiles a shared-memory all-reduce the first time a backend is made (about a minute) and keeps
# 66 MB of /dev/shm per rank. Only inference with tensor parallelism calls it, so the tests mark it as not available,
# which is what deepspeed itself does on machines that cannot build it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# Modules are a million objects that never die: the collection after each engine skips them (0.2 s each otherwise).
gc.collect()
gc.freeze()
