# SPDX-License-Identifier: Apache-2.0
"""Measures the links and steps of a running job, and changes its plan."""
