"""FeatureExtractor: a model that gives, beside its output [B, C], the input of its last layer [B, D].

The layer is an nn.Linear, named or found at the first batch. The model is not changed: it is watched for the length of
a call, and no hook stays.

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
>>> output, features = FeatureExtractor(model).forward_with_features(torch.ones(4, 3))
>>> output.shape, features.shape
(torch.Size([4, 1]), torch.Size([4, 2]))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.tangent.inputs import call
from lapwing.tangent.last_layer import check_reduction, last_layer_name, linear_layer, recorded


class FeatureExtractor(nn.Module):
    """`feature_reduction` ("pick_first", "pick_last", "average") takes features [B, ..., D] to [B, D].

    Features are detached unless `enable_backprop`.
    """

    def __init__(
        self,
        model: nn.Module,
        last_layer_name: str | None = None,
        enable_backprop: bool = False,
        feature_reduction: str | None = None,
    ) -> None:
        super().__init__()
        self.feature_reduction = None if feature_reduction is None else str(feature_reduction)
        check_reduction(self.feature_reduction)
        self.model = model
        self.enable_backprop = enable_backprop
        self._last_layer_name: str | None = None
        if last_layer_name is not None:
            self.set_last_layer(last_layer_name)

    @property
    def last_layer(self) -> nn.Linear | None:
        """The layer, or None before it is known."""
        return None if self._last_layer_name is None else linear_layer(self.model, self._last_layer_name)

    def set_last_layer(self, last_layer_name: str) -> None:
        """Names the last layer, as in `model.named_modules()`."""
        linear_layer(self.model, last_layer_name)
        self._last_layer_name = last_layer_name

    def find_last_layer(self, x: Any) -> Tensor:
        """Finds the last layer by a run at the inputs x, and gives the output there."""
        self.set_last_layer(last_layer_name(self.model, x, self.feature_reduction))
        return call(self.model, x)

    def forward(self, x: Any) -> Tensor:
        return self.find_last_layer(x) if self._last_layer_name is None else call(self.model, x)

    def forward_with_features(self, x: Any) -> tuple[Tensor, Tensor]:
        """Output and features of one pass."""
        if self._last_layer_name is None:
            self.set_last_layer(last_layer_name(self.model, x, self.feature_reduction))
        name = self._last_layer_name
        assert name is not None
        with recorded({name: linear_layer(self.model, name)}) as uses:
            output = call(self.model, x)
        if not uses:
            raise ModelError(f"the layer '{name}' did not run in the forward pass; expected it to, as last operation.")
        features = uses[-1].features
        features = self._reduced(features if self.enable_backprop else features.detach())
        return output, features

    def _reduced(self, features: Tensor) -> Tensor:
        if features.dim() <= 2 or self.feature_reduction is None:
            return features
        inner = features.flatten(1, -2)
        if self.feature_reduction == "average":
            return inner.mean(1)
        return inner[:, 0 if self.feature_reduction == "pick_first" else -1]

    def extra_repr(self) -> str:
        return f"last_layer_name={self._last_layer_name!r}, feature_reduction={self.feature_reduction!r}"
