# SPDX-License-Identifier: Apache-2.0
"""C++ and CUDA sources of the kernels.  A package only so that the sources are found where it is installed."""
