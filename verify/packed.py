"""Linear layers whose weights are laid out once for a CPU's matrix kernels, which read them block by block.

Worth it where many rows go through at a time, as in an audit: about 15 % of a forward pass of SmolLM2-135M, for a
second copy of the weights. oneDNN's operators for it are torch's own (its compiler freezes models with them) but
not documented, so a torch without them leaves the model as it was. Not here: which models are worth it (prefill.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

_KERNELS_KEPT = 32  # more than a model has shapes of layers


class PackedLinears:
    """The float32 linear layers of a model on the CPU, run from packed copies of their weights."""

    def __init__(self, model: nn.Module) -> None:
        # oneDNN keeps compiled kernels of the last 1,024 shapes, most of a gigabyte, and every pass has another shape.
        # Read when the first is made.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS_KEPT))
        os.environ.setdefault("LRU_CACHE_CAPACITY", str(_KERNELS_KEPT))
        # Subclasses may compute something else; hooks of the layers stay in force.
        self._layers = [module for module in model.modules() if type(module) is nn.Linear] if _available() else []
        self.refresh()

    def refresh(self) -> None:
        """Pack anew, after the weights have changed."""
        for layer in self._layers:
            layer.forward = _packed_forward(layer)  # type: ignore[method-assign,assignment]


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()), layer.bias

    def forward(input: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
        return found

    return forward


def _available() -> bool:
    """Whether this torch has the operators and they compute what a linear layer computes."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    layer = nn.Linear(16, 8).requires_grad_(False)
    rows = torch.arange(64.0).reshape(1, 4, 16)
    try:
        return torch.allclose(_packed_forward(layer)(rows), layer(rows), rtol=1e-4, atol=1e-4)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
