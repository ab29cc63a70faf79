"""Muon (Jordan et al. 2024): orthogonalised momentum for the matrices between the embeddings.

torch.optim.Muon computes in bfloat16, which a CPU without AMX emulates; this one computes in the
parameters' type, and on all parameters of one shape at once.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class Muon(Optimizer):
    """Updates 2-D parameters; those of one shape are orthogonalised in one batch."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def step(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
                for param in group["params"]:
                    if param.grad is not None:
                        by_shape[param.shape].append(param)
                for params in by_shape.values():
                    self._update(params, group["lr"], group["momentum"], group["weight_decay"])

    def _update(
        self, params: list[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        """Update parameters of one shape, (rows, columns)."""
        steps = []
        for param in params:
            buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
            buffer.lerp_(param.grad, 1 - momentum)
            steps.append(torch.lerp(param.grad, buffer, momentum))
        rows, columns = params[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for param, update in zip(params, orthogonal(torch.stack(steps)), strict=True):
            param.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)


def orthogonal(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Approximately the nearest orthogonal matrices, by a quintic Newton-Schulz iteration.

    matrices: (batch, rows, columns).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
