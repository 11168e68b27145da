# SPDX-License-Identifier: Apache-2.0
"""How ranks keep parameters equal: error feedback of lossy packets, collectives by level."""
