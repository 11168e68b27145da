# SPDX-License-Identifier: Apache-2.0
"""Simulation of a training step, event by event, without torch."""
