# SPDX-License-Identifier: Apache-2.0
"""The package's version, in one place.  setuptools reads this file as text, so keep it one plain assignment."""

__version__ = "0.2.0"
