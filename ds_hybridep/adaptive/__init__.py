# SPDX-License-Identifier: Apache-2.0
"""A job that measures its links and its steps, and plans itself anew."""
