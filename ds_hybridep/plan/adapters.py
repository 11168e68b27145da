# SPDX-License-Identifier: Apache-2.0
"""LoRA: small matrices beside frozen ones, which alone are trained.

Beside a matrix [out, in], an adapter of rank r has two, [r, in] and [out, r].  Biases, norms, routers, the table and
the head have none.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from ds_hybridep.geometry.slots import Shape
from ds_hybridep.plan.workload import MoEModel, num_params

Where = Literal["none", "attention", "experts", "all"]
WHERE: tuple[Where, ...] = ("none", "attention", "experts", "all")

Trained = tuple[tuple[Shape, ...] | None, tuple[Shape, ...] | None]  # of an expert, of all else; None: everything


def with_adapters(model: MoEModel, where: Where, rank: int) -> tuple[MoEModel, Trained]:
    """The model with its adapters, and the shapes of what is trained: of one expert, and of all else.

    where: "attention", or what stands in its place in a layer; routed "experts"; or "all": both, shared experts and
    dense layers.  "none": there are no adapters, and everything is trained.
    """
    if where == "none":
        return model, (None, None)
    beside_experts = [shape for shape in model.expert_shapes if len(shape) == 2]
    of_expert = _adapters(beside_experts if where != "attention" else (), rank)
    matrices = () if where == "experts" else model.attention_matrices
    matrices += model.other_matrices if where == "all" else ()
    of_dense = _adapters(matrices, rank)
    num_in_experts = model.num_moe_layers * model.num_experts * num_params(of_expert)
    adapted = replace(
        model,
        expert_shapes=model.expert_shapes + of_expert,
        dense_shapes=model.dense_shapes + of_dense,
        active_dense_params=model.active_dense_params + num_params(of_dense),
        num_adapter_params=num_in_experts + num_params(of_dense),
    )
    return adapted, (of_expert, of_dense)


def _adapters(matrices: Iterable[Shape], rank: int) -> tuple[Shape, ...]:
    return tuple(shape for rows, cols in matrices for shape in ((rank, cols), (rows, rank)))
