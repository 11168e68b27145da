# SPDX-License-Identifier: Apache-2.0
"""What one engine has under one plan, and all that goes with it and knows nothing of DeepSpeed."""
