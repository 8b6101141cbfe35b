"""What a row of the table is: package, class, a tiny configuration with random weights, an input and a likelihood.

A builder imports its package itself, so that this file can be read where none is installed. It returns the model, a
batch of three data points that differ, and the name of a likelihood. `refused` lists the structures in which a refusal
is right, and the comment beside it says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from problems import Net

CLASSES, REALS = "classification", "regression"
Built = tuple[nn.Module, Any, str]


@dataclass(frozen=True)
class Row:
    package: str
    name: str
    build: Callable[[], Built]
    refused: tuple[str, ...] = ()


class Rows(list[Row]):
    """The rows of one file."""

    def network(self, package: str, name: str, *refused: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
        """A decorator that adds a builder."""

        def add(build: Callable[[], Built]) -> Callable[[], Built]:
            self.append(Row(package, name, build, refused))
            return build

        return add


def image(channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(3, channels, size, size)


def tokens(high: int = 13, length: int = 5) -> Tensor:
    return torch.randint(2, high, (3, length))


def padded(high: int = 13) -> dict[str, Tensor]:
    """Token ids of three lengths with their mask; 0 is the padding."""
    ids = tokens(high)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    mask[1, 4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def pooled(backbone: nn.Module, width: int, call: Callable[[Any], Tensor] | None = None, outputs: int = 3) -> Net:
    """A linear head on the mean of a backbone's tokens [B, T, width]; `call` takes them from its output."""
    take = call or (lambda out: out.last_hidden_state)
    return Net(
        lambda m, *x, **named: m.head(take(m.net(*x, **named)).mean(1)), net=backbone, head=nn.Linear(width, outputs)
    )
