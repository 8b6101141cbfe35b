"""What is known of a torch function when it is seen: its name, what it writes into, and whether it must be refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lapwing.errors import ModelError, UnsupportedOperationError
from lapwing.tangent.rules import IN_PLACE

_DROPOUT = frozenset(
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
) | {torch.dropout}
_ASKS_FOR_MODES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_RESHAPED = frozenset(
    (F.linear, F.bilinear, F.embedding, F.instance_norm, torch.matmul, Tensor.matmul, torch.einsum, *_CONVOLUTIONS)
)
INDEXING = frozenset(
    f"{name}{end}"
    for name in (
        "__getitem__", "__setitem__", "index", "index_select", "index_add", "index_copy", "index_put", "gather", "take",
        "take_along_dim", "masked_select", "masked_scatter", "scatter", "scatter_add", "scatter_reduce",
        "repeat_interleave", "_pack_padded_sequence",
    )
    for end in ("", "_")
)  # fmt: skip
WRITING, REFUSABLE = "writes into its first argument", "may be random, or couple samples"


class TensorSet:
    """Tensors by identity, for as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref] = {}

    def add(self, *values: Any) -> None:
        """Tensors; whatever else is given is left out."""
        for value in values:
            if isinstance(value, Tensor):
                self._known[id(value)] = weakref.ref(value)

    def meets(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of the tensors is in the set."""
        for tensor in tensors:
            known = self._known.get(id(tensor))
            if known is not None and known() is tensor:
                return True
        return False


def flat(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, also in lists and mappings. Called for every operation: written to be quick."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += flat(value, {})
        elif isinstance(value, dict):
            found += flat(value.values(), {})
    return found


def written_to(kind: str | None, args: tuple, kwargs: dict) -> Tensor | None:
    """The tensor that an operation writes into: of an in-place method, of an assignment to an index, of `out=`."""
    if kwargs and isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    return args[0] if kind is WRITING and args and isinstance(args[0], Tensor) else None


def name_of(func: Callable) -> str:
    return traits(func)[0]


@lru_cache(maxsize=1024)
def traits(func: Callable) -> tuple[str, str | None]:
    """The name of an operation, and whether it writes into its first argument or may have to be refused."""
    plain = getattr(func, "__name__", "")
    name = plain or str(func)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    in_place = plain.endswith("_") and not plain.endswith("__")
    if in_place or plain == "__setitem__" or func in IN_PLACE:
        return name, WRITING
    refusable = func in _DROPOUT or func in RECURRENT
    refusable = refusable or func in (F.batch_norm, F.scaled_dot_product_attention, F.embedding, F.embedding_bag)
    return name, REFUSABLE if refusable else None


def refuse_train_mode(func, args, kwargs) -> None:
    """Operations that couple samples or draw random numbers in train mode."""
    if func is F.batch_norm:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training")
        bound = dict(zip(names, args, strict=False)) | kwargs
        if bound.get("training", False):
            remedy = "Call model.eval() first."
            if bound.get("running_mean") is None:
                remedy = "Build the layer with track_running_stats=True, and let it see data in train mode."
            raise ModelError(
                "batch_norm normalises by the batch, as in train mode, which couples its samples; expected running "
                f"statistics. {remedy}"
            )
    elif func in _DROPOUT:
        bound = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        default = func is not torch.dropout and func not in (F.alpha_dropout, F.feature_alpha_dropout)
        training = bound.get("training", bound.get("train", default))
        if training and bound.get("p", 0.5) > 0:
            _refuse_random(name_of(func))
    elif func is F.scaled_dot_product_attention:
        names = ("query", "key", "value", "attn_mask", "dropout_p")
        if (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) > 0:
            _refuse_random("dropout in attention")
    elif func in RECURRENT:
        # (input, hx, weights, bias, layers, dropout, train, ...), with batch_sizes after input for packed sequences
        dropout, train = args[5:7] if isinstance(args[3], bool) else args[6:8]
        if dropout > 0 and train:
            _refuse_random(f"dropout in {name_of(func)}")
    else:
        refuse_rewriting(func, args, kwargs)


def refuse_rewriting(func, args, kwargs) -> None:
    """Tables that are renormalised in the forward pass: the parameters are the user's own."""
    if func in (F.embedding, F.embedding_bag):
        third = "padding_idx" if func is F.embedding else "offsets"
        bound = dict(zip(("input", "weight", third, "max_norm"), args, strict=False)) | kwargs
        if bound.get("max_norm") is not None:
            raise UnsupportedOperationError(
                f"{name_of(func)} with max_norm rewrites its weight during the forward pass; expected a forward pass "
                "that leaves the parameters alone. Renormalise the table once and build the layer without max_norm."
            )


def _refuse_random(what: str) -> None:
    raise ModelError(
        f"{what} is active (train mode), so that the network is a random function; expected a deterministic one. "
        "Call model.eval() first."
    )


def owned(func: Callable, out: Any, given: list[Tensor]) -> Any:
    """The result of an operation that makes new entries, as no view of a tensor that only the operation knew.

    A linear map of [N, T, D] or an instance norm returns its result reshaped, which autograd takes for a view: an
    in-place activation would rewrite the history of what lies under it, and lead past the operation that was recorded.
    The memory is the same; none of these operations keeps its result for its derivative.
    """
    if func not in _RESHAPED or not isinstance(out, Tensor) or not out._is_view():
        return out
    base = out._base
    if any(tensor is base or tensor._base is base for tensor in given):  # einsum of one operand is a plain view of it
        return out
    return torch.ops.aten._unsafe_view(out, out.shape)


# -- plain kernels in place of fused ones: torch's own switches hold for the whole process, these for one call ---------


def inlined(func: Callable) -> Callable:
    """The same composite function, whose body runs with a mode active instead of handing it the call once more."""
    assert isinstance(func, FunctionType)
    unasked = {name: _never for name in _ASKS_FOR_MODES if name in func.__globals__}
    space = {**func.__globals__, **unasked}
    copy = FunctionType(func.__code__, space, func.__name__, func.__defaults__, closure=func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*_: Any) -> bool:
    return False


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args, **kwargs) -> Tensor:
    """By the one kernel that can be differentiated twice and run under `vmap`."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch._scaled_dot_product_attention_math(query, key, value, attn_mask, *args, **kwargs)[0]


def _lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel for packed sequences, which can be differentiated twice; that of whole batches cannot."""
    if not isinstance(args[3], bool):  # packed already: (data, batch_sizes, hx, ...)
        return torch.lstm(*args)
    *given, batch_first = args
    x, hx, *rest = given
    x = x.transpose(0, 1) if batch_first else x
    steps, batch = x.shape[:2]
    out, h, c = torch.lstm(x.flatten(0, 1), torch.full((steps,), batch), hx, *rest)
    out = out.unflatten(0, (steps, batch))
    return out.transpose(0, 1) if batch_first else out, h, c


PLAIN: dict[Callable, Callable | None] = {
    F.multi_head_attention_forward: None,
    F.scaled_dot_product_attention: _attention,
    torch.lstm: _lstm,
}
"""Functions with fused kernels, and what is run instead of them; None for one whose parts are."""


def plain_of(func: Callable) -> Callable | None:
    """What is run for a function: itself, or a plain kernel in place of a fused one; None for one whose parts are."""
    return func if func not in PLAIN or recomputed() else PLAIN[func]


def kept_by_hooks() -> Any:
    """The hooks that get what operations keep for their derivatives, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


def recomputed() -> bool:
    """Whether we are inside `torch.utils.checkpoint`, which repeats a forward pass on the way back, without our modes.

    Functions run there as they are: what other kernels keep for their derivatives would be taken for what these keep.
    """
    hooks = kept_by_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


class Plain(TorchFunctionMode):
    """Runs plain kernels in place of fused ones, in this thread."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        plain = plain_of(func)
        if plain is not None:
            return plain(*args, **(kwargs or {}))
        with self:
            return inlined(func)(*args, **(kwargs or {}))
