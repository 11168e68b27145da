# SPDX-License-Identifier: Apache-2.0
"""Channels between ranks over the link and NCCL, byte counters, agreement at start-up, traces."""
