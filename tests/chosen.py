"""A sub-network for every structure: some entries, or whole tensors where a structure cannot cut through them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapwing.laplace.structures import STRUCTURES


def positions(model: nn.Module, structure: str, some: Tensor | None = None) -> Tensor:
    """Positions in the flat vector: `some` (four by default), or the first weight and the last layer's tensors."""
    if STRUCTURES[structure].parts_of_tensors:
        return torch.tensor([0, 3, 7, 30]) if some is None else some
    sizes = [p.numel() for p in model.parameters()]
    return torch.cat([torch.arange(sizes[0]), torch.arange(sum(sizes[:-2]), sum(sizes))])
