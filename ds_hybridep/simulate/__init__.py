# SPDX-License-Identifier: Apache-2.0
"""A training step, event by event: pure Python, without torch."""
