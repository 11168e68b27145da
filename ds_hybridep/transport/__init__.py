# SPDX-License-Identifier: Apache-2.0
"""Channels between ranks: gloo, NCCL and staging, byte counters, agreement at start-up, traces."""
