# SPDX-License-Identifier: Apache-2.0
"""All code that touches DeepSpeed: its engine, its optimizers, its MoE layers, and the table of patches."""
