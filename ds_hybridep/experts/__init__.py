# SPDX-License-Identifier: Apache-2.0
"""Replicas of a domain's experts, and the return of their gradients to the owners."""
