# SPDX-License-Identifier: Apache-2.0
"""Sites: jobs of their own, each with its launcher and its DeepSpeed world, that train one model together."""
