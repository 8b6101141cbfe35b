"""FeatureTangent: the last layer alone, whose Jacobian is its input: f = W phi + b, so J = I_C (x) [phi; 1].

One plain forward pass gives f [B, C] and the features phi [B, D]; no graph is kept and nothing is differentiated. A
layer that is applied at T positions of every data point has features [B, T, D] and outputs [B, T, C]. Memory
O(B T D + B T C); the identity of the rows is expanded along the batch and takes [T C, T C] once.

In every batch the output must be phi W^T + b, with no other operation on W or b; it may be that of one position, which
may be another for every data point. Once per shape of the input, a second pass on a few samples makes sure that
autograd's gradient in W is the one from phi, and that samples do not touch each other.

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
>>> x = torch.randn(4, 3)
>>> linear_map = FeatureTangent(model).at(x)
>>> torch.equal(linear_map.features, model[:2](x)), linear_map.rows().shape
(True, torch.Size([4, 1, 3]))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import DataError, ModelError
from lapwing.linalg.autocast import outside_modes
from lapwing.linalg.budget import DEFAULT_BUDGET, chunks
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import OuterRows, Piece, assemble
from lapwing.params import ParamSpace
from lapwing.tangent.inputs import all_finite, batch_size, call, check_input, outside_inference, shape_key, take
from lapwing.tangent.last_layer import (
    GENERAL,
    REDUCTIONS,
    Readers,
    by_sample,
    check_deterministic,
    check_reduction,
    differ,
    explains,
    last_layer_of,
    layer_space,
    linear_layer,
    parameter_name,
    recorded,
)
from lapwing.tangent.model import MOST_PROBES, check_output, check_space, check_trainable
from lapwing.tangent.private import private


@dataclass
class FeatureTangent:
    """The network as a function of its last layer, the nn.Linear `name` (default: found at the first batch).

    `reduction` says how the model comes from features [B, T, D] to outputs [B, C], where the layer is applied at every
    position: "pick_first", "pick_last" or "average" over axis 1. With `differentiable` the forward pass keeps its
    graph, so that outputs and features carry gradients in the inputs. `evaluate` runs the network in eval mode,
    whatever mode the model is in.
    """

    model: nn.Module
    name: str | None = None
    reduction: str | None = None
    budget: int = DEFAULT_BUDGET
    differentiable: bool = False
    evaluate: bool = False
    _checked: set[tuple] = field(default_factory=set, repr=False)
    _space: ParamSpace | None = field(default=None, repr=False)
    _layout: MatrixLayout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if self.name is not None:
            check_space(self.space, self.model)

    @property
    def layer(self) -> nn.Linear:
        """The last layer."""
        return linear_layer(self.model, self._known)

    @property
    def space(self) -> ParamSpace:
        """The last layer's weight, and its bias where it has a trainable one; settled when first asked for."""
        if self._space is None:
            self._space = layer_space(self.model, self._known, self.layer)
        return self._space

    @property
    def layout(self) -> MatrixLayout:
        """Where the matrix [W, b] lies in the flat vector."""
        if self._layout is None:
            (rows, cols), starts = self.layer.weight.shape, self.space.starts
            weight, bias = (starts.get(parameter_name(self._known, part)) for part in ("weight", "bias"))
            assert weight is not None, "the space holds the weight"
            self._layout = MatrixLayout(weight, (rows, cols), (0, 1), 1, rows, cols, bias)
        return self._layout

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: self.model.get_parameter(name) for name in self.space.names}

    @property
    def _known(self) -> str:
        if self.name is None:
            raise ModelError(
                "the last layer is not known before the first batch; expected a name, or at(x) called once. Give "
                "name=last_layer_name(model, x)."
            )
        return self.name

    def network(self) -> nn.Module:
        """The network to run: a private copy of the model, with the model's own parameters."""
        return private(self.model, self.evaluate)

    @outside_modes
    def at(self, x: Any) -> FeatureMap:
        """One forward pass at the inputs x."""
        x = outside_inference(x)
        network = self.network()
        check_deterministic(network)
        if self.name is None:
            self.name = self._found(network, x)
        check_input(x, self.space.device)
        check_trainable(self.parameters)
        found = self._forward(network, x, self.differentiable)
        key = shape_key(x), () if self.evaluate else tuple(module.training for module in network.modules())
        if key not in self._checked:
            self._check(network, found)
            if all_finite(found.output):  # numbers that are not finite prove nothing
                if len(self._checked) >= MOST_PROBES:
                    self._checked.clear()
                self._checked.add(key)
        return found

    def _found(self, network: nn.Module, x: Any) -> str:
        """The last layer's name, from a few samples; from all where the model takes no other batch size."""
        try:
            return last_layer_of(network, take(x, slice(0, 2)), self.reduction)
        except ModelError:
            return last_layer_of(network, x, self.reduction)

    def _forward(self, network: nn.Module, x: Any, graph: bool) -> FeatureMap:
        layer, space = linear_layer(network, self._known), self.space
        readers = Readers(parameter for parameter in (layer.weight, layer.bias) if parameter is not None)
        with recorded({self._known: layer}) as uses, torch.set_grad_enabled(graph), readers:
            output = call(network, x)
        if len(uses) != 1:
            raise ModelError(
                f"the layer '{self._known}' ran {len(uses)} times in the forward pass; expected once, as last "
                f"operation. {GENERAL}"
            )
        if readers.count != 1:
            raise ModelError(
                f"the weight or bias of the last layer '{self._known}' is read by {readers.count} operations; expected "
                "parameters that the network uses nowhere else (not tied to another layer, no parametrisation). "
                f"{GENERAL}"
            )
        batch = batch_size(x)
        if output.dim() < 2 or output.shape[0] != batch:
            check_output(output, batch)
        (use,) = uses
        features = use.by_sample(batch, self.reduction, output)
        # asked in every batch: what the model does with the layer's output may depend on the data
        explained = features is not None and features.shape[1] * layer.out_features == output[0].numel()
        if not explained or not (use.is_whole(output) or explains(layer, features, output)):
            raise ModelError(self._unexplained(use.features, output))
        assert features is not None
        if not graph:
            output, features = output.detach(), features.detach()
        return FeatureMap(x, output, features.to(space.dtype), space, self.layout, self.budget)

    # -- what the closed form rests on -----------------------------------------------------------------------------

    def _check(self, network: nn.Module, found: FeatureMap) -> None:
        """A pass over a few samples agrees, and has the gradient of phi."""
        again = self._few(network, found)
        if differ(again.output, found.output[: again.batch]):
            raise ModelError(
                f"the first data points give another output in a batch of {again.batch} than in one of {found.batch}; "
                "expected independent samples and a deterministic model. Call model.eval(); a layer that normalises or "
                "attends over the batch axis, or draws random numbers, cannot be linearised per sample."
            )
        check_output(again.output, again.batch)
        u = torch.sin(1 + torch.arange(again.output.numel(), device=again.output.device)).reshape(again.output.shape)
        parameters = self.parameters
        gradients = torch.autograd.grad(
            again.output, list(parameters.values()), u.to(again.output.dtype), allow_unused=True
        )
        expected = found.space.unravel(again.rmv(u.to(found.space.dtype)))
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            if differ(gradient, expected[name]):
                raise ModelError(
                    f"the gradient of the outputs in '{name}' is not that of one use by the last layer; expected a "
                    "weight that the network uses nowhere else (not tied to another layer, no parametrisation). "
                    f"{GENERAL}"
                )

    def _few(self, network: nn.Module, found: FeatureMap) -> FeatureMap:
        """The first samples again, with a graph; all of them where the model takes no other batch size."""
        count = max(1, min(2, found.batch - 1))
        if count < found.batch:
            try:
                again = self._forward(network, take(found.x, slice(0, count)), graph=True)
            except ModelError:
                again = None
            if again is not None and again.output.shape[1:] == found.output.shape[1:]:
                return again
        return self._forward(network, found.x, graph=True)

    def _unexplained(self, features: Tensor, output: Tensor) -> str:
        fits = [kind for kind in REDUCTIONS if explains(self.layer, by_sample(features, len(output), kind), output)]
        hint = f"reduction='{fits[0]}' (feature_reduction) explains it. " if fits and self.reduction is None else ""
        how = "" if self.reduction is None else f" reduced by '{self.reduction}'"
        return (
            f"the model's output of shape {tuple(output.shape)} is not what its last layer '{self._known}' makes of "
            f"features of shape {tuple(features.shape)}{how}; expected phi W^T + b, at most reshaped. {hint}{GENERAL}"
        )


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """J = I (x) [phi; 1] at a batch of inputs; meets the `LinearMap` contract. `shared` holds phi at T positions."""

    x: Any
    output: Float[Tensor, "batch *out"]
    shared: Float[Tensor, "batch positions width"]
    space: ParamSpace
    layout: MatrixLayout
    budget: int = DEFAULT_BUDGET

    @property
    def batch(self) -> int:
        return self.output.shape[0]

    @property
    def outputs(self) -> int:
        """All outputs of one data point, T C."""
        return self.shared.shape[1] * self.layout.rows

    @property
    def value(self) -> Float[Tensor, "batch *out"]:
        """The network's output in the dtype of the curvature."""
        return self.output.to(self.space.dtype)

    @property
    def features(self) -> Float[Tensor, "batch width"] | Float[Tensor, "batch positions width"]:
        """phi, what the last layer's weight is multiplied with: [B, D], or [B, T, D] at T positions."""
        return self.shared.squeeze(1) if self.shared.shape[1] == 1 else self.shared

    @cached_property
    def right(self) -> Float[Tensor, "batch positions joined"]:
        """[phi; 1] where the layer has a bias, else phi."""
        if self.layout.bias is None:
            return self.shared
        return torch.cat([self.shared, self.shared.new_ones(*self.shared.shape[:-1], 1)], dim=-1)

    def mv(self, v: Float[Tensor, " params"]) -> Float[Tensor, "batch *out"]:
        """J v: the last layer with v for its weights."""
        self.space.check(v)
        return torch.einsum("n t i, o i -> n t o", self.right, self.layout.gather(v)[0]).reshape(self.output.shape)

    def rmv(self, u: Float[Tensor, "batch *out"]) -> Float[Tensor, " params"]:
        """J^T u summed over the batch: one product."""
        if u.shape != self.output.shape:
            raise DataError(
                f"the cotangent has shape {tuple(u.shape)}; expected that of the outputs, {tuple(self.output.shape)}."
            )
        by_position = u.reshape(*self.shared.shape[:2], self.layout.rows)
        out = self.right.new_zeros(self.space.size)
        self.layout.scatter_add(torch.einsum("n t o, n t i -> o i", by_position, self.right).unsqueeze(0), out)
        return out

    def rows(self) -> Float[Tensor, "batch outputs params"]:
        """J spelled out, [B, T C, P]; for small problems and for tests."""
        return assemble(self.pieces(), self.space.size, slice(0, self.batch)).transpose(0, 1)

    def pull(self, cotangents: Float[Tensor, "r batch *out"]) -> list[Piece]:
        """Rows u[r,n]^T J[n] of every cotangent and data point."""
        left = cotangents.reshape(len(cotangents), *self.shared.shape[:2], 1, self.layout.rows)
        return [OuterRows(self.layout, left, self.right.unsqueeze(2))]

    def pieces(self) -> list[Piece]:
        """The identity for every data point, expanded along the batch, with [phi; 1]."""
        return self._rows_of(slice(0, self.outputs))

    def columns(self) -> Iterator[list[Piece]]:
        each = 3 * self.batch * self.outputs * self.space.dtype.itemsize
        return (self._rows_of(part) for part in chunks(self.outputs, each, self.budget))

    def _rows_of(self, outputs: slice) -> list[Piece]:
        count = outputs.stop - outputs.start
        eye = torch.zeros(count, self.outputs, dtype=self.space.dtype, device=self.shared.device)
        eye.diagonal(outputs.start).fill_(1)
        left = eye.reshape(count, 1, self.shared.shape[1], 1, self.layout.rows).expand(-1, self.batch, -1, -1, -1)
        return [OuterRows(self.layout, left, self.right.unsqueeze(2))]

    def parts(self) -> Iterator[FeatureMap]:
        """This map, or maps of consecutive sub-batches whose [T C, T C] products stay within the budget."""
        each = 3 * self.outputs**2 * self.space.dtype.itemsize
        if each * self.batch <= self.budget:
            yield self
            return
        for rows in chunks(self.batch, each, self.budget):
            yield FeatureMap(
                take(self.x, rows), self.output[rows], self.shared[rows], self.space, self.layout, self.budget
            )
