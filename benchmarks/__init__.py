# SPDX-License-Identifier: Apache-2.0
"""Programs that measure: `python -m benchmarks` lists them."""
