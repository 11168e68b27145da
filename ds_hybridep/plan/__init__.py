# SPDX-License-Identifier: Apache-2.0
"""Pure functions of clusters, groups and sizes: no torch, no DeepSpeed, no clock; SI base units throughout."""
