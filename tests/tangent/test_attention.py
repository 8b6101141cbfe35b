"""Attention under every kind of mask: values, Jacobians and drawn networks, against softmax(q k^T s + mask) v."""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from lapwing import Laplace, estimate
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent
from problems import Net

B, T, E, H = 3, 4, 4, 2


def asked(mask: str) -> tuple[dict[str, Any], Tensor]:
    """Options of the fused function, and the same as a matrix that is added to the scores."""
    generator = torch.Generator().manual_seed(3)
    may = torch.rand(T, T, generator=generator) < 0.5
    may[:, 0] = True
    each = torch.rand(B, 1, T, T, generator=generator) < 0.5
    each[..., 0] = True
    added = torch.randn(T, T, generator=generator, dtype=torch.float64)
    zero = torch.zeros(T, T, dtype=torch.float64)
    return {
        "none": ({}, zero),
        "boolean": ({"attn_mask": may}, zero.masked_fill(~may, -inf)),
        "added": ({"attn_mask": added}, added),
        "causal": ({"is_causal": True}, zero.masked_fill(torch.ones(T, T).triu(1).bool(), -inf)),
        "scaled": ({"scale": 0.3}, zero),
        "boolean and scaled": ({"attn_mask": may, "scale": 0.3}, zero.masked_fill(~may, -inf)),
        "boolean of each data point": ({"attn_mask": each}, zero.expand(B, 1, T, T).masked_fill(~each, -inf)),
    }[mask]


MASKS = ["none", "boolean", "added", "causal", "scaled", "boolean and scaled"]


def heads(m: nn.Module, x: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (H, E // H)).transpose(1, 2) for part in m.qkv(x).chunk(3, -1)]


def ends(m: nn.Module, out: Tensor) -> Tensor:
    return m.out(out.transpose(1, 2).flatten(2).mean(1))


def members() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"qkv": nn.Linear(E, 3 * E), "out": nn.Linear(E, 3)}


def fused(mask: str) -> nn.Module:
    options = asked(mask)[0]
    body = lambda m, x: ends(m, F.scaled_dot_product_attention(*heads(m, x), **options))  # noqa: E731
    return Net(body, **members()).double().eval()


def by_hand(mask: str) -> nn.Module:
    options, added = asked(mask)
    scale = options.get("scale", 1 / sqrt(E // H))

    def body(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = heads(m, x)
        return ends(m, (scale * q @ k.mT + added).softmax(-1) @ v)

    return Net(body, **members()).double().eval()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, T, E, generator=generator, dtype=torch.float64), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("mask", MASKS)
def test_attention_under_a_mask_is_that_by_hand(mask: str) -> None:
    (x, y), model, plain = inputs(), fused(mask), by_hand(mask)
    found = Tangent(model).at(x)
    torch.testing.assert_close(found.value, plain(x).detach())
    torch.testing.assert_close(found.rows(), oracle.jacobian(plain, x), rtol=1e-8, atol=1e-10)
    second = estimate.hessian(Tangent(model), Categorical(), [(x, y)], structure="full").dense()
    torch.testing.assert_close(second, oracle.hessian(plain, Categorical(), x, y), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mask", [*MASKS, "boolean of each data point"])
def test_networks_drawn_with_attention_are_those_by_hand(mask: str) -> None:
    """Draws are run together, by the plain kernel."""
    (x, y), found = inputs(), []
    for model in (fused(mask), by_hand(mask)):
        la = Laplace(model, "classification", "all", "diag")
        la.fit([(x, y)])
        found.append((la(x), la.functional_samples(x, "nn", 3, generator=torch.Generator().manual_seed(0))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mask", ["boolean", "added", "of each head", "padding", "added padding"])
def test_multi_head_attention_under_its_own_masks(mask: str) -> None:
    """nn.MultiheadAttention has the opposite sign for booleans (True is masked), and takes [B H, T, T] too.

    What differs between data points is an input of its own.
    """
    generator = torch.Generator().manual_seed(5)
    hide = torch.rand(T, T, generator=generator) < 0.4
    hide[:, 0] = False
    numbers = torch.zeros(T, T, dtype=torch.float64).masked_fill(hide, -2.0)
    of_heads = torch.randn(B, H, T, T, generator=generator, dtype=torch.float64)
    padded = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    none = torch.zeros(B, 1, dtype=torch.float64)
    zero = torch.zeros(1, 1, T, T, dtype=torch.float64)
    extra, options, added = {
        "boolean": (none, lambda e: {"attn_mask": hide}, lambda e: zero.masked_fill(hide, -inf)),
        "added": (none, lambda e: {"attn_mask": numbers}, lambda e: zero + numbers),
        "of each head": (of_heads, lambda e: {"attn_mask": e.flatten(0, 1)}, lambda e: e),
        "padding": (padded, lambda e: {"key_padding_mask": e}, lambda e: zero.masked_fill(e[:, None, None], -inf)),
        "added padding": (
            -padded.double(),
            lambda e: {"key_padding_mask": e, "attn_mask": numbers},
            lambda e: zero + numbers + e[:, None, None],
        ),
    }[mask]
    torch.manual_seed(0)
    attention, out = nn.MultiheadAttention(E, H, batch_first=True).double().eval(), nn.Linear(E, 2).double()
    nn.init.normal_(attention.in_proj_bias)

    def plain(m: nn.Module, x: Tensor, e: Tensor) -> Tensor:
        parts = F.linear(x, m.attention.in_proj_weight, m.attention.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (H, E // H)).transpose(1, 2) for part in parts)
        mixed = (q @ k.mT / sqrt(E // H) + added(e)).softmax(-1) @ v
        return m.out(m.attention.out_proj(mixed.transpose(1, 2).flatten(2)).mean(1))

    def own(m: nn.Module, x: Tensor, e: Tensor) -> Tensor:
        return m.out(m.attention(x, x, x, need_weights=False, **options(e))[0].mean(1))

    x = (inputs()[0], extra)
    model, reference = Net(own, attention=attention, out=out), Net(plain, attention=attention, out=out)
    found = Tangent(model).at(x)
    torch.testing.assert_close(found.value, reference(*x).detach())
    torch.testing.assert_close(found.rows(), oracle.jacobian(reference, x), rtol=1e-8, atol=1e-10)
