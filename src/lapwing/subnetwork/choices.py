"""Choices of weights: a `ParamSpace` [P] -> the smaller `ParamSpace` [n] of a sub-network.

    largest_magnitude, largest_variance, random    n weights, cut through tensors
    by_parameters, by_modules, last_layer(s)       whole tensors

A choice by score costs O(P log P) time and O(P) memory; every other one O(n), nothing of the size of all weights is
made. Positions are those of the flat vector of the space they are taken from.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(3, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 0.1)
    >>> model.weight.data[0, 1] = -2.0
    >>> largest_magnitude(ParamSpace.of(model), model, 1).index
    tensor([1])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lapwing.errors import ModelError, ParameterError
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.uses import Contraction


def largest_magnitude(space: ParamSpace, model: nn.Module, n: int) -> ParamSpace:
    """The n weights of largest absolute value."""
    return _largest(space, space.values(model).abs(), n, "magnitude")


def largest_variance(space: ParamSpace, variance: Float[Tensor, " size"], n: int) -> ParamSpace:
    """The n weights of largest variance, as from a diagonal posterior or `swag_variance`."""
    return _largest(space, variance, n, "variance")


def random(space: ParamSpace, n: int, generator: torch.Generator | None = None) -> ParamSpace:
    """n weights drawn without replacement, all sets equally likely."""
    check_count(space, n)
    place = torch.device("cpu") if generator is None else generator.device
    if 2 * n > space.size:
        return space.select(mask=torch.randperm(space.size, generator=generator, device=place)[:n])
    # the first n different ones of a sequence of draws; a permutation of all P would be the whole memory
    found = torch.empty(0, dtype=torch.int64, device=place)
    while len(found) < n:
        more = torch.randint(space.size, (n - len(found),), generator=generator, device=place)
        found = torch.cat([found, more]).unique()
    return space.select(mask=found)


def by_parameters(space: ParamSpace, names: Iterable[str]) -> ParamSpace:
    """Whole tensors, by the names of `named_parameters()`."""
    names = _names(names, "parameter")
    for name in names:
        if name not in space.names:
            raise ParameterError(unknown("parameter", name, space.names))
    return space.select(names)


def by_modules(space: ParamSpace, names: Iterable[str]) -> ParamSpace:
    """All tensors of the modules, and of the modules inside them, by the names of `named_modules()`."""
    names = _names(names, "module")
    owners = sorted({name[:at] for name in space.names for at, c in enumerate(name) if c == "."})
    for name in names:
        if name and name not in owners:
            raise ParameterError(unknown("module with parameters", name, owners))
    return space.select([own for own in space.names if any(not name or own.startswith(f"{name}.") for name in names)])


def last_layer(space: ParamSpace, model: nn.Module, x: Any) -> ParamSpace:
    """The weight that is multiplied last when `model` runs on the inputs x, and its bias. One recorded pass."""
    return last_layers(space, model, x, 1)


def last_layers(space: ParamSpace, model: nn.Module, x: Any, n: int) -> ParamSpace:
    """The n weights that are multiplied last when `model` runs on the inputs x, and their biases. One recorded pass.

    A weight that is used twice counts once, where it is used last. Layers without such a weight, as those that
    normalise, count for nothing and are not in it: name them with `by_modules`.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ParameterError(f"the last {n!r} layers were asked for; expected a number >= 1.")
    linearisation = Tangent(model, space.whole, evaluate=True).at(x)
    used = [(use, {name for source in use.sources for name in source.names}) for use, _ in linearisation.uses]
    found: dict[str, int] = {}
    for i, (use, names) in reversed(list(enumerate(used))):
        if isinstance(use, Contraction) and use.weight and len(found) < n:
            found.setdefault(min(names), i)
    if not found:
        raise ModelError(
            f"no operation of {type(model).__name__} multiplies its input by a trainable weight; expected a linear or "
            "convolutional layer. Name the layer: by_modules(space, ['...'])."
        )
    if len(found) < n:
        raise ParameterError(
            f"the last {n} layers were asked for, and {type(model).__name__} has {len(found)}: "
            f"{[_module(name) for name in reversed(found)]}; expected a number from 1 to {len(found)}."
        )
    owners = {_module(name) for name in found}
    later = {name for _, names in used[min(found.values()) :] for name in names if _module(name) in owners}
    return space.select([name for name in space.names if name in later])


def positions(space: ParamSpace, chosen: ParamSpace) -> Int[Tensor, " chosen"]:
    """Where the entries of a sub-network lie in the flat vector of `space`, in increasing order."""
    missing = [name for name in chosen.names if name not in space.starts]
    if missing:
        raise ParameterError(
            f"the sub-network has parameter '{missing[0]}', which is not in the larger space; expected all of its "
            "tensors there. Choose from this space."
        )
    if chosen.index is None:
        segments = [space.whole.segment(name) for name in chosen.names]
        found = torch.cat([torch.arange(part.start, part.stop, device=space.device) for part in segments])
    else:
        number = chosen.tensor_of(chosen.index)
        away = torch.tensor([space.starts[name] - chosen.starts[name] for name in chosen.names], device=space.device)
        found = chosen.index + away[number]
    found = found.sort().values
    if space.index is not None:
        place = torch.searchsorted(space.index, found).clamp_max(len(space.index) - 1)
        found = place[space.index[place] == found]
    if len(found) != chosen.size:
        raise ParameterError(
            f"{chosen.size - len(found)} entries of the sub-network are not in the larger space; expected all of them. "
            "Choose from this space."
        )
    return found


def check_count(space: ParamSpace, n: int | None) -> None:
    """Refuses a number of weights that the space does not have."""
    if n is None or isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= space.size:
        raise ParameterError(f"a sub-network of {n} weights; expected a number from 1 to {space.size} (= P).")


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """What an error says of a name that is none of those known."""
    near = get_close_matches(name, known, n=1)
    return f"no {kind} '{name}' here; " + (f"did you mean '{near[0]}'?" if near else f"expected some of {list(known)}.")


# -- details --------------------------------------------------------------------------------------------------------


def _largest(space: ParamSpace, scores: Tensor, n: int, what: str) -> ParamSpace:
    check_count(space, n)
    space.check(scores)
    if bool(torch.isnan(scores).any()):
        raise ParameterError(
            f"the {what} of weight {int(torch.isnan(scores).nonzero()[0])} is NaN; expected numbers. Check the model."
        )
    return space.select(mask=scores.argsort(descending=True, stable=True)[:n])


def _names(names: Iterable[str], kind: str) -> list[str]:
    found = list(names)
    if isinstance(names, str) or not found:
        raise ParameterError(f"{kind} names are {names!r}; expected a list with at least one name, ['...'].")
    return found


def _module(name: str) -> str:
    """The module that owns a parameter; a parametrisation (weight norm) belongs to the module that it is put on."""
    return (
        name.partition("parametrizations.")[0].rstrip(".") if "parametrizations." in name else name.rpartition(".")[0]
    )
