"""Rules of the tape for sums of products: linear, convolutions, matmul, einsum, bilinear. Arguments are squared.

Where an entry of the output holds an entry of an argument in one product only, J is that product's other factor, and
the vjp of the same operation with squared arguments holds J^2. Otherwise the other factors are summed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_letters

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.tangent.convolution import as_tuple
from lapwing.tangent.operations import WRITING, flat, traits
from lapwing.tangent.rules import methods
from lapwing.tape.nodes import Node, Rule
from lapwing.tape.rules.kinds import Squares, register


class Multilinear(Rule):
    """y_o sums products, an entry of an argument in one of them: with the arguments squared, its vjp holds J^2."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,) = given
        assert m is not None
        squared = [t.square().to(m.dtype) if t.is_floating_point() else t for t in node.given]
        leaves = [squared[number].requires_grad_() for number in node.inputs]
        scales = {key: node.kwargs[key] ** 2 for key in ("alpha", "beta") if key in node.kwargs}
        with torch.enable_grad():
            if traits(node.function)[1] is WRITING:  # a leaf may not be written to
                squared[0] = squared[0].clone()
            (y,) = replace(node, kwargs=node.kwargs | scales).again(squared)
        grads = torch.autograd.grad([y], leaves, [m])
        return list(zip(node.inputs.values(), grads, strict=True))


class Linear(Multilinear):
    """F.linear, without a second forward pass."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (x, weight, *_) = given, node.given
        if node.kwargs or x.dim() < 2:  # arguments in an order of their own, a single vector
            return super().squares(node, given)
        assert m is not None
        found: Squares = []
        for number, value in node.inputs.items():
            if number == 0:
                found.append((value, m @ weight.square().to(m.dtype)))
            elif number == 1:
                found.append((value, m.flatten(0, -2).mT @ x.square().to(m.dtype).flatten(0, -2)))
            else:
                found.append((value, m.flatten(0, -2).sum(0)))
        return found


class Convolution(Multilinear):
    """Convolutions and their transposes, by the backward kernel alone."""

    def __init__(self, dims: int, transposed: bool) -> None:
        self.dims, self.transposed = dims, transposed

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        names = ("input", "weight", "bias", "stride", "padding")
        names += ("output_padding", "groups", "dilation") if self.transposed else ("dilation", "groups")
        defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
        options = defaults | dict(zip(names, node.args, strict=False)) | node.kwargs
        (m,), (x, weight, *_) = given, node.given
        if isinstance(options["padding"], str) or x.dim() != self.dims + 2 or flat((), node.kwargs):
            return super().squares(node, given)
        assert m is not None
        stride, padding, dilation, extra = (
            list(as_tuple(options[name], self.dims)) for name in ("stride", "padding", "dilation", "output_padding")
        )
        wanted = [number in node.inputs for number in range(3)]
        sizes = [m.shape[1]] if wanted[2] else None
        grads = torch.ops.aten.convolution_backward(
            m.contiguous(), x.square().to(m.dtype), weight.square().to(m.dtype), sizes, stride, padding, dilation,
            self.transposed, extra, options["groups"], wanted,
        )  # fmt: skip
        return [(value, grads[number]) for number, value in node.inputs.items()]


class Einsum(Rule):
    """y = sum of products of all operands: for each, the others are contracted first, then squared."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), operands = given, node.given
        assert m is not None
        terms, out = _labels(node.args[0], operands)
        if any(len(set(term)) < len(term) for term in terms):
            raise UnsupportedOperationError(
                f"einsum '{node.args[0]}' takes a diagonal; expected each label once per operand. Take the diagonal "
                "before, with torch.diagonal."
            )
        return [(value, _squared(terms, out, operands, number, m)) for number, value in node.inputs.items()]


class Bilinear(Rule):
    """y_o = a^T W_o b + c_o."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), operands = given, node.given
        assert m is not None
        if flat((), node.kwargs):
            raise UnsupportedOperationError("bilinear is called by keyword; expected F.bilinear(a, b, weight, bias).")
        terms, out = _labels("...i,...j,oij->...o", operands[:3])
        return [
            (value, m.flatten(0, -2).sum(0) if number == 3 else _squared(terms, out, operands[:3], number, m))
            for number, value in node.inputs.items()
        ]


def _labels(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The labels of every operand and of the result, an ellipsis spelled out."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    free = [letter for letter in ascii_letters if letter not in equation]
    extra = [t.dim() - len(term.replace("...", "")) for t, term in zip(operands, terms, strict=True)]
    shared = "".join(free[: max([0, *(count for count, term in zip(extra, terms, strict=True) if "..." in term)])])
    terms = [term.replace("...", shared[len(shared) - count :]) for count, term in zip(extra, terms, strict=True)]
    if not arrow:  # the labels that occur once, in order
        seen = "".join(terms)
        out = "..." + "".join(sorted(label for label in set(seen) - set(shared) if seen.count(label) == 1))
    return terms, out.replace("...", shared)


def _squared(terms: Sequence[str], out: str, operands: Sequence[Tensor], number: int, m: Tensor) -> Tensor:
    """sum_o J[o, i]^2 m_o in one operand of an einsum."""
    mine, shape = terms[number], operands[number].shape
    # a label of size 1 that is summed was broadcast: the others are summed over it
    varying = [label for label, size in zip(mine, shape, strict=True) if size > 1 or label in out]
    others = [term for place, term in enumerate(terms) if place != number]
    kept = "".join(label for label in dict.fromkeys("".join(others)) if label in out or label in varying)
    squared = []
    if others:
        rest = [operand.to(m.dtype) for place, operand in enumerate(operands) if place != number]
        squared = [torch.einsum(f"{','.join(others)}->{kept}", *rest).square()]
    there = "".join(label for label in varying if label in out or label in kept)
    share = torch.einsum(f"{','.join([out, *([kept] if others else [])])}->{there}", m, *squared)
    # a label that only this operand has was summed: the same for each of its entries
    for axis, label in enumerate(mine):
        if label not in there:
            share = share.unsqueeze(axis)
        elif shape[axis] == 1:
            share = share.sum(axis, keepdim=True)
    return share.expand(shape)


register(Linear(), F.linear)
register(
    Multilinear(),
    *methods("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger", "__matmul__", "__rmatmul__"),
    *methods("addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "addmv", "addmv_", "addr", "addr_"),
    *methods("tensordot", "kron"),
    *(torch.linalg.matmul, torch.linalg.vecdot),
)
register(Einsum(), torch.einsum)
register(Bilinear(), F.bilinear)
for _dims, _forward, _back in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    register(Convolution(_dims, transposed=False), _forward)
    register(Convolution(_dims, transposed=True), _back)
