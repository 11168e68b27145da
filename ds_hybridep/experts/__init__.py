# SPDX-License-Identifier: Apache-2.0
"""The way of an expert: replicas of a domain's experts, and their gradients back to the owners."""
