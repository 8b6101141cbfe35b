"""Composite functions in plain operations, which a walk along the tape can follow."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T scale + mask) v in plain operations, which a walk can follow."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    elif attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if boolean else scores + attn_mask
    weights = scores.softmax(-1)
    nothing = (scores == float("-inf")).all(-1, keepdim=True)  # a query that may look at nothing gets zeros
    return weights.masked_fill(nothing, 0.0) @ value if bool(nothing.any()) else weights @ value


def composite(func: Callable) -> bool:
    """Whether a function of torch is written in Python, so that its body can be seen."""
    return isinstance(func, FunctionType) and func.__module__ in ("torch.nn.functional", "torch.functional")
