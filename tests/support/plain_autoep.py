# SPDX-License-Identifier: Apache-2.0
"""Runs a script whose ds_config has AutoEP but no block, so that newer versions of transformers do not stop it.

deepspeed --no_local_rank tests/support/plain_autoep.py SCRIPT ...
"""

import runpy
import sys

import hf_models

hf_models.let_plain_autoep_work()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
