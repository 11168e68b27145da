# SPDX-License-Identifier: Apache-2.0
"""All that touches DeepSpeed: the import hook's target, attach, patches, MoE layers, checkpoints."""
