"""The prior's part of a training loss: its gradient in place is that of autograd, for tensors of any kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.training.prior_term import PriorTerm


@pytest.mark.parametrize("mean", [0.0, 0.3, "each"])
@pytest.mark.parametrize("structure", ["isotropic", "layerwise", "per_tensor", "diagonal"])
@pytest.mark.parametrize("before", ["none", "some"])
def test_the_gradient_is_added_to_what_is_there(structure: str, mean: float | str, before: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    space, tensors = ParamSpace.of(model), list(model.parameters())
    count = {"isotropic": 1, "layerwise": 2, "per_tensor": 4, "diagonal": space.size}[structure]
    about = torch.linspace(-1, 1, space.size, dtype=torch.float64) if isinstance(mean, str) else mean
    prior = getattr(Prior, structure)(space, torch.linspace(0.5, 2, count, dtype=torch.float64), about)
    term = PriorTerm.of(prior, space, points=7)
    value = prior.scatter(space.ravel(dict(model.named_parameters()))) / 14
    torch.testing.assert_close(term.value(tensors), value, rtol=1e-12, atol=0)
    expected = torch.autograd.grad(3 * value, tensors)
    for tensor in tensors:
        tensor.grad = None if before == "none" else torch.ones_like(tensor)
    term.add_gradient(tensors, 3.0)
    for tensor, slope in zip(tensors, expected, strict=True):
        assert tensor.grad is not None
        there = 0 if before == "none" else 1
        torch.testing.assert_close(tensor.grad, slope + there, rtol=1e-12, atol=1e-15)


def test_a_sparse_gradient_becomes_dense() -> None:
    table = nn.Embedding(4, 2, sparse=True).double()
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    space = ParamSpace.of(table)
    expected = table.weight.grad.to_dense() + 5 * table.weight.detach() / 10
    PriorTerm.of(Prior.isotropic(space, 5.0), space, points=10).add_gradient([table.weight])
    torch.testing.assert_close(table.weight.grad, expected, rtol=1e-12, atol=0)


def test_half_precision_weights_keep_gradients_of_their_own_dtype() -> None:
    layer = nn.Linear(3, 1, bias=False).to(torch.bfloat16)
    space = ParamSpace.of(layer)
    for there in (None, torch.ones_like(layer.weight)):
        layer.weight.grad = there
        PriorTerm.of(Prior.isotropic(space, 2.0, 0.5), space, points=1).add_gradient([layer.weight])
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.bfloat16
