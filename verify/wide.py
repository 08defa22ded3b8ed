"""Linear layers in bfloat16 on a CPU that has no instructions for it: their products summed in float32.

The product of two bfloat16 values is exact in float32, and bfloat16 kernels sum in float32 and round once at the end.
So a float32 multiplication of the same values, rounded, is the same computation up to the order of its sums: about
six times faster on such a CPU, for a copy of the weights in float32. Not here: which models are worth it (model.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class WideLinears:
    """The bfloat16 linear layers of a model on the CPU, multiplied in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is nn.Linear]
        self.refresh()

    def refresh(self) -> None:
        """Copy anew, after the weights have changed."""
        for layer in self._layers:
            layer.forward = _wide_forward(layer)  # type: ignore[method-assign,assignment]


def _wide_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = layer.weight.detach().float()
    bias = None if layer.bias is None else layer.bias.detach().float()

    def forward(input: Tensor) -> Tensor:
        return functional.linear(input.float(), weight, bias).to(torch.bfloat16)

    return forward


def is_worthwhile() -> bool:
    """Whether this CPU's vector units stop before AVX-512, the first with bfloat16."""
    return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
