# SPDX-License-Identifier: Apache-2.0
"""Pure functions of clusters, groups and sizes.  They use SI base units, and no torch, no DeepSpeed and no clock."""
