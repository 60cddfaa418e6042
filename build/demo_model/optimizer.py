"""Muon for the matrices of the layers, AdamW for the embedding and the norms.

Muon orthogonalises each matrix's momentum, all matrices of one shape in one batched product.
Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic iteration's coefficients, from the source
ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace each matrix's singular values by about 1.  matrices: [n, rows, cols]; computed in bfloat16 on CUDA."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled by sqrt(max(1, rows/cols)); decoupled weight decay."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        shapes = sorted({tuple(p.shape) for p in params})
        groups = [{"params": [p for p in params if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here re-evaluates the loss
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            gradients = [p.grad for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
            updates = orthogonalise(torch.stack(ahead))
            rows, cols = updates.shape[1:]
            scale = -group["lr"] * max(1.0, rows / cols) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates.unbind()), alpha=scale)


def build_optimizers(network: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """[Muon over the layers' matrices, AdamW over everything else]; each group remembers its peak rate."""
    matrices = [p for name, p in network.named_parameters() if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in network.named_parameters() if p.dim() < 2 or ".layers." not in name]
    is_cuda = others[0].is_cuda
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.025),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=is_cuda),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
