# SPDX-License-Identifier: Apache-2.0
"""The program ds_hybridep, one file per subcommand."""
