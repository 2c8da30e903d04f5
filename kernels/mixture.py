"""Mixture of experts: a router picks a few feed-forward blocks per row, and their outputs are added by weight.

    p       = softmax(router(x)) over all experts, float32
    chosen  = the top_k largest of p, equals in order of their ids
    weight  = p, divided by the sum of the chosen ones where `norm_topk` says so
    out     = sum over the chosen experts, in order of their ids, of weight * expert(x)

The router is a float32 matrix in every format: a row that flips between two experts is another row. Sums over experts run
in a fixed order and the matrices compute a row as if it were alone, so the bits of a row do not depend on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from numem.kernels.activation import exp, gated
from numem.kernels.operations import Linear
from numem.kernels.program import Call, Part


@dataclass(frozen=True, slots=True)
class Mixture:
    """The operation: out = the weighted sum of the chosen experts of each row.

    Attributes:
        router: [experts, hidden].
        gate_up, down: of the experts, by id; gate and up stacked.
        act: activation of the gate.
        x, out: float32 [rows, hidden], different buffers.
    """

    router: Linear
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    top_k: int
    norm_topk: bool
    act: str
    x: Part
    out: Part

    def run(self, call: Call) -> None:
        x, out = call.parts[self.x.index], call.parts[self.out.index]
        ids, weights = route(self.router(x), self.top_k, norm_topk=self.norm_topk)
        out.zero_()
        for expert in np.unique(ids).tolist():
            rows, place = np.nonzero(ids == expert)
            at = torch.from_numpy(rows)
            inner = gated(self.gate_up[expert](x[at]), act=self.act)
            y = self.down[expert](inner) * torch.from_numpy(weights[rows, place])[:, None]
            out[at] += y


def route(logits: Tensor, top_k: int, *, norm_topk: bool) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each row and their weights.

    Args:
        logits: float32 [rows, experts].

    Returns:
        ids int64 [rows, top_k], largest first and equals by id; weights float32 [rows, top_k].
    """
    shifted = logits - torch.from_numpy(logits.numpy().max(axis=1, keepdims=True))
    likely = exp(shifted).numpy()
    # numpy adds pairwise in blocks that its build decides, but accumulates one by one.
    likely /= np.add.accumulate(likely, axis=1)[:, -1:]
    ids = np.argsort(-likely, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(likely, ids, axis=1)
    if norm_topk:
        weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    return ids, weights
