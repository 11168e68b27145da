# SPDX-License-Identifier: Apache-2.0
"""One layer's experts on their way: weights from the owners to the replicas."""

from contextlib import nullcontext

from torch import Tensor

from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.sync.transfers import Gather
from ds_hybridep.transport.channels import Purpose


class WeightShipment(Gather):
    """One gather of a layer's weights.

    An exact one ships every parameter as it is, frozen ones too, and begins the mirrors anew.  Otherwise trainable
    parameters go, as the codec of the slowest level between owner and replica has it.
    """

    def __init__(self, replicas: Replicas, *, is_exact: bool) -> None:
        self._messages: dict[int, list[Tensor]] = {}
        purpose = Purpose("expert_weights", "shipping of expert weights", replicas.layer)
        super().__init__(replicas, purpose, self._messages, is_exact=is_exact)
        self._replicas = replicas

    def load(self) -> None:
        """Take the owned experts' weights as they are now, and encode them.  Comes before the first `advance`."""
        replicas, feedback = self._replicas, self._replicas.feedback
        # In the current stream: under ZeRO-3 DeepSpeed gathers parameters for that.
        patches = {} if feedback is None or self._is_exact else feedback.patches
        weights = replicas.own_weights() if patches else []
        if not patches:
            replicas.load_own_weights(trainable_only=not self._is_exact)
        if feedback is None or not (feedback.mirrors or patches):
            return
        streams = replicas.streams
        with nullcontext() if streams is None else streams.aside(), feedback.counters.timing("encode_s"):
            if self._is_exact:
                for mirror in feedback.mirrors.values():
                    mirror.assign(replicas.weight_parts[replicas.own_slot])
                return
            for level, sender in patches.items():  # all are one
                if not self._messages:
                    messages = sender.encode(weights)  # brings the own slot up to them
                self._messages[level] = messages
            sources = replicas.source_weights() if feedback.mirrors else []
            encoded = {name: [mirror.encode(sources)] for name, mirror in feedback.mirrors.items()}
            self._messages.update({level: encoded[name] for level, name in feedback.mirror_names.items()})
