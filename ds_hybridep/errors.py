# SPDX-License-Identifier: Apache-2.0
"""Every error that this package raises on purpose.

Each is also a built-in error.  A message says where, what was found, what was expected, what to do next.
"""


class HybridEPError(Exception):
    """Base of all errors of this package; catch it to catch them all."""


class ConfigError(HybridEPError, ValueError):
    """A setting of the "hybridep" block is wrong; the message starts with its key path. Correct the config."""


class PlanError(HybridEPError, ValueError):
    """Cluster, group, experts and domain sizes do not fit together. Change the setting that the message names."""


class UnsupportedError(HybridEPError, RuntimeError):
    """DeepSpeed has a feature turned on that is refused here. Turn off that feature, or this package."""


# What other ranks have sent has no graph here, so a part would be missing.
NO_SECOND_DERIVATIVES = (
    "MoE layers have no second derivatives while hybridep is attached (create_graph=True, as for a gradient penalty); "
    'leave MoE layers out of it, or set "hybridep": {"enabled": false}'
)


class AgreementError(HybridEPError, RuntimeError):
    """Ranks differ in config, plan or version at start-up, or one is missing. Align the ranks that are named."""


class SiteError(HybridEPError, RuntimeError):
    """This site cannot train with the others. The message says whether to change a setting or to start it again."""


class CommunicationError(HybridEPError, RuntimeError):
    """A wait passed its time limit or a transfer failed. The job cannot go on: restart it from a checkpoint."""


class GradientNotReturnedError(HybridEPError, RuntimeError):
    """The optimizer stepped before replica gradients had reached their owner, which would lose them."""


class VerificationError(HybridEPError, RuntimeError):
    """A replica and its owner's copy of it differ. More training would diverge silently: restart from a checkpoint."""


class PacketError(HybridEPError, RuntimeError):
    """A packet cannot be applied: other codec settings, another shape, or packets before it are missing."""


class KernelBuildError(HybridEPError, RuntimeError):
    """Compiled kernels were asked for but cannot be built or loaded. Fix the tool chain or choose "reference"."""


class ExportError(HybridEPError, RuntimeError):
    """A checkpoint could not be exported, and no folder was written; the message names the file and what is wrong."""


class LabError(HybridEPError, RuntimeError):
    """The links of an experiment could not be shaped or restored as asked."""
