# SPDX-License-Identifier: Apache-2.0
"""All code that touches DeepSpeed: the import hook's target, attach, patches, MoE layers, checkpoints."""
