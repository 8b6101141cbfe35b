"""ParamSpace: the trainable parameters of a model as one flat vector, in `named_parameters()` order, row-major.

Every flat vector in lapwing has this order. Memory O(number of tensors); nothing of the model is copied.

    >>> from torch import nn
    >>> space = ParamSpace.of(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    >>> space.names, space.size
    (('0.weight', '0.bias', '2.weight', '2.bias'), 13)
    >>> space.select(module="2").size
    4
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lapwing.errors import ModelError, ParameterError


@dataclass(frozen=True, eq=False)
class ParamSpace:
    """Which parameters, and where each lives in the flat vector.

    `index`, when given, keeps only those positions of the concatenated tensors (a sub-network); the flat vector
    then has `len(index)` entries. `dtype` is the one that curvature is accumulated in: the widest of the
    parameters', and float32 for half-precision models.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    index: Int[Tensor, " size"] | None = None

    def __eq__(self, other: object) -> bool:
        """The same entries of the same tensors."""
        if not isinstance(other, ParamSpace) or self._key != other._key:
            return False
        if self.index is None or other.index is None:
            return self.index is other.index
        return torch.equal(self.index, other.index)

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple:
        return self.names, self.shapes, self.dtype, self.device, self.size

    @staticmethod
    def of(model: nn.Module) -> ParamSpace:
        """All parameters of `model` with `requires_grad=True`; a tensor registered twice counts once."""
        if not isinstance(model, nn.Module):
            inside = [
                name for name in ("module_", "module", "model") if isinstance(getattr(model, name, None), nn.Module)
            ]
            remedy = f"Give its {inside[0]}, which is one." if inside else "Give the network itself."
            raise ModelError(f"the model is a {type(model).__name__}; expected a torch.nn.Module. {remedy}")
        _refuse_sharded(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ModelError(
                f"{type(model).__name__} has no trainable parameter; a curvature needs at least one with "
                "requires_grad=True. Call model.requires_grad_(True), or unfreeze the layers to treat as random."
            )
        for name, p in named:
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ModelError(
                    f"parameter '{name}' is not initialised yet (a lazy module); expected one with a shape: run the "
                    "model once on a batch first."
                )
            if not p.dtype.is_floating_point:
                raise ModelError(
                    f"parameter '{name}' has dtype {p.dtype}; expected a real floating-point dtype. Store a complex "
                    "parameter as its real and imaginary part (torch.view_as_real), or freeze it."
                )
        devices = {p.device for _, p in named}
        if len(devices) > 1:
            raise ModelError(
                f"parameters lie on several devices ({sorted(map(str, devices))}); expected one. Move the model to one."
            )
        dtype = torch.float32
        for _, p in named:
            dtype = torch.promote_types(dtype, p.dtype)
        return ParamSpace(tuple(name for name, _ in named), tuple(p.shape for _, p in named), dtype, named[0][1].device)

    # -- where things are ------------------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> ParamSpace:
        """The same tensors without the index: the space that records of operations refer to."""
        return self if self.index is None else ParamSpace(self.names, self.shapes, self.dtype, self.device)

    @cached_property
    def starts(self) -> dict[str, int]:
        """First position of each tensor in the concatenation of whole tensors."""
        starts, at = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            starts[name] = at
            at += shape.numel()
        return starts

    @cached_property
    def total(self) -> int:
        """Number of entries of the whole tensors, before `index`."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def size(self) -> int:
        """P, the length of a flat vector."""
        return self.total if self.index is None else len(self.index)

    def shape(self, name: str) -> torch.Size:
        return self.shapes[self._position(name)]

    def segment(self, name: str) -> slice:
        """Positions of a whole tensor in the concatenation of whole tensors."""
        start = self.starts[self.names[self._position(name)]]
        return slice(start, start + self.shape(name).numel())

    # -- flat and back ---------------------------------------------------------------------------------------------

    def ravel(self, tree: Mapping[str, Tensor]) -> Float[Tensor, "*batch size"]:
        """Flat vector of a mapping name -> tensor; leading batch axes before the parameter's shape are kept."""
        missing = [name for name in self.names if name not in tree]
        if missing:
            raise ParameterError(f"no entry for parameter '{missing[0]}'; expected one for each of {list(self.names)}.")
        parts = []
        first = tree[self.names[0]]
        batch = first.shape[: max(0, first.dim() - len(self.shapes[0]))]
        for name, shape in zip(self.names, self.shapes, strict=True):
            value = tree[name]
            lead = value.shape[: max(0, value.dim() - len(shape))]
            if value.shape[len(lead) :] != shape:
                raise ParameterError(
                    f"entry '{name}' has shape {tuple(value.shape)}; expected (*batch, {', '.join(map(str, shape))})."
                )
            if lead != batch:
                raise ParameterError(
                    f"entry '{name}' has batch axes {tuple(lead)} before its shape; expected {tuple(batch)}, those of "
                    f"'{self.names[0]}'."
                )
            parts.append(value.reshape(*lead, shape.numel()).to(self.dtype))
        return self.restrict(torch.cat(parts, dim=-1))

    def unravel(self, v: Float[Tensor, "*batch size"]) -> dict[str, Tensor]:
        """Mapping name -> tensor [*batch, *shape] of a flat vector; entries outside `index` are zero."""
        self.check(v)
        parts = self.expand(v).split([shape.numel() for shape in self.shapes], dim=-1)
        return {
            name: part.reshape((*v.shape[:-1], *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def restrict(self, v: Tensor) -> Tensor:
        """From the concatenation of whole tensors [..., total] to the flat vector [..., P]."""
        return v if self.index is None else v[..., self.index]

    def expand(self, v: Tensor) -> Tensor:
        """From the flat vector [..., P] to the concatenation of whole tensors, zero outside `index`."""
        if self.index is None:
            return v
        out = v.new_zeros(*v.shape[:-1], self.total)
        out[..., self.index] = v
        return out

    def check(self, v: Tensor) -> None:
        if v.shape[-1:] != (self.size,):
            raise ParameterError(f"flat vector has shape {tuple(v.shape)}; expected last axis {self.size} (= P).")

    def values(self, model: nn.Module) -> Float[Tensor, " size"]:
        """The model's current parameters as a flat vector (a copy)."""
        named = dict(model.named_parameters())
        flat = self.ravel({name: named[name].detach() for name in self.names})
        return flat.clone() if len(self.names) == 1 else flat  # several are joined in a tensor of their own

    # -- groups ----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules that own parameters, in order of first appearance."""
        return tuple(dict.fromkeys(_owner(name) for name in self.names))

    def groups(self, by: str = "tensor") -> Int[Tensor, " size"]:
        """Group number of every entry: `by` is "tensor" (one per parameter tensor) or "layer" (one per module)."""
        if by == "tensor":
            ids = list(range(len(self.names)))
        elif by == "layer":
            ids = [self.layers.index(_owner(name)) for name in self.names]
        else:
            raise ParameterError(f"unknown grouping {by!r}; expected 'tensor' or 'layer'.")
        numbers = torch.tensor(ids, device=self.device)
        if self.index is not None:
            return numbers[self.tensor_of(self.index)]
        sizes = torch.tensor([shape.numel() for shape in self.shapes], device=self.device)
        return torch.repeat_interleave(numbers, sizes)

    def tensor_of(self, positions: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The number of the tensor that each position of the concatenation of whole tensors lies in; O(n) memory."""
        ends = torch.tensor([self.starts[name] + self.shape(name).numel() for name in self.names], device=self.device)
        return torch.searchsorted(ends, positions, right=True)

    # -- sub-selection ---------------------------------------------------------------------------------------------

    def select(
        self,
        names: Iterable[str] | None = None,
        *,
        module: str | None = None,
        mask: Bool[Tensor, " size"] | Int[Tensor, " chosen"] | None = None,
    ) -> ParamSpace:
        """A smaller space: by parameter names, by module (its name; "" is the whole model), or by a mask.

        A mask is boolean [P] or integer positions in the flat vector; it may cut through tensors.
        """
        if sum(choice is not None for choice in (names, module, mask)) != 1:
            raise ParameterError("select got none, or several; expected exactly one of names, module, mask.")
        if mask is not None:
            return self._select_mask(mask)
        if names is not None:
            if isinstance(names, str):
                raise ParameterError(f"names is the string {names!r}; expected an iterable of parameter names.")
            wanted = set(names)
            unknown = sorted(wanted - set(self.names))
            if unknown:
                raise ParameterError(f"no parameter '{unknown[0]}' in this space; there are {list(self.names)}.")
        else:
            prefix = f"{module}." if module else ""
            wanted = {name for name in self.names if name.startswith(prefix)}
            if not wanted:
                raise ParameterError(f"module '{module}' owns no parameter here; layers are {list(self.layers)}.")
        kept = [i for i, name in enumerate(self.names) if name in wanted]
        if not kept:
            raise ParameterError("the selection is empty; expected at least one parameter.")
        smaller = ParamSpace(
            tuple(self.names[i] for i in kept), tuple(self.shapes[i] for i in kept), self.dtype, self.device
        )
        if self.index is None:
            return smaller
        chosen = torch.zeros(self.total, dtype=torch.bool, device=self.device)
        chosen[self.index] = True
        positions = torch.cat([chosen[self.whole.segment(name)] for name in smaller.names])
        return smaller._select_mask(positions)

    def tightened(self) -> ParamSpace:
        """The same entries in the same order, without the tensors that none is of; whole tensors need no index."""
        if self.index is None:
            return self
        number, counts = self.tensor_of(self.index).unique(return_counts=True)
        kept = number.tolist()
        names, shapes = tuple(self.names[i] for i in kept), tuple(self.shapes[i] for i in kept)
        tight = ParamSpace(names, shapes, self.dtype, self.device)
        if counts.tolist() == [shape.numel() for shape in shapes]:
            return tight
        away = torch.tensor([tight.starts[name] - self.starts[name] for name in names], device=self.device)
        return replace(tight, index=self.index + away.repeat_interleave(counts))

    def cut(self) -> tuple[str, ...]:
        """The names of tensors of which some entries are here and some are not."""
        if self.index is None:
            return ()
        number, counts = self.tensor_of(self.index).unique(return_counts=True)
        pairs = zip(number.tolist(), counts.tolist(), strict=True)
        return tuple(self.names[i] for i, count in pairs if count != self.shapes[i].numel())

    def _select_mask(self, mask: Tensor) -> ParamSpace:
        if mask.dim() != 1:
            raise ParameterError(f"mask has shape {tuple(mask.shape)}; expected one axis.")
        if mask.dtype == torch.bool:
            self.check(mask)
            chosen = mask.nonzero().squeeze(1)
        elif not mask.dtype.is_floating_point:
            chosen = mask.unique()
            if len(chosen) and not (0 <= int(chosen[0]) and int(chosen[-1]) < self.size):
                raise ParameterError(f"mask has positions outside 0..{self.size - 1}.")
            if len(chosen) != len(mask):
                raise ParameterError("mask names a position twice; expected distinct positions.")
        else:
            raise ParameterError(f"mask has dtype {mask.dtype}; expected bool [P] or integer positions.")
        if not len(chosen):
            raise ParameterError("the mask selects nothing; expected at least one position.")
        chosen = chosen.to(self.device)
        index = chosen if self.index is None else self.index[chosen]
        return ParamSpace(self.names, self.shapes, self.dtype, self.device, index)

    def _position(self, name: str) -> int:
        if name not in self.names:
            raise ParameterError(f"no parameter '{name}' in this space; there are {list(self.names)}.")
        return self.names.index(name)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _refuse_sharded(model: nn.Module) -> None:
    """Refuses weights of which every process has a part; what makes such weights is imported where they are."""
    tensors, fsdp = sys.modules.get("torch.distributed.tensor"), sys.modules.get("torch.distributed.fsdp")
    parts = [name for name, p in model.named_parameters() if tensors is not None and isinstance(p, tensors.DTensor)]
    flat = fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in model.modules())
    if parts or flat:
        found = f"parameter '{parts[0]}' is a DTensor" if parts else "the model is in FullyShardedDataParallel"
        raise ModelError(
            f"{found}, of which every process has a part (FSDP, tensor parallelism); expected whole weights on every "
            "rank. Build the model again without sharding and fill it: get_model_state_dict(model, options="
            "StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict. "
            "DistributedDataParallel keeps whole weights, and is fine."
        )
