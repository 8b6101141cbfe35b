"""What must be the same on all ranks before they fit together, and what must not: the numbers that each draws."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import RanksError
from lapwing.laplace.checkpoint import digest
from lapwing.laplace.fitted import Fitted
from lapwing.laplace.hyper import HyperParameters
from lapwing.laplace.process_group import ProcessGroup
from lapwing.laplace.setup import Setup
from lapwing.params import ParamSpace


def check_same(
    ranks: ProcessGroup, setup: Setup, hyper: HyperParameters, space: ParamSpace, fitted: Fitted | None
) -> None:
    """One network with the same numbers, one posterior with the same options, the same data so far."""
    numbers = {name: getattr(hyper, name) for name in ("prior_precision", "prior_mean", "sigma_noise", "temperature")}
    options = {name: digest(v) if isinstance(v, Tensor) else repr(v) for name, v in setup.options.items()}
    entries = {name: value for name, value in setup.model.state_dict().items() if isinstance(value, Tensor)}
    mine = {
        "posterior": setup.name,
        "likelihood": type(setup.distribution).__name__,
        "parameters": [[name, list(shape)] for name, shape in zip(space.names, space.shapes, strict=True)],
        **{f"option {name!r}": value for name, value in options.items()},
        **{name: digest(value.detach()) for name, value in numbers.items()},
        "data seen before": None if fitted is None else [fitted.n_data, fitted.fingerprint],
        **{f"weights or buffers {name!r}": digest(value) for name, value in entries.items()},
    }
    said = ranks.agreed("comparing the networks of the ranks", mine)
    for rank, theirs in enumerate(said):
        other = [name for name in {**said[0], **theirs} if said[0].get(name) != theirs.get(name)]
        if other:
            raise RanksError(
                f"rank {rank} and rank 0 differ in {other[0]}{f' and {len(other) - 1} more' if other[1:] else ''}; "
                "expected the same network and the same options on all ranks. Send weights and buffers (which every "
                "rank's normalisation layers change) from rank 0: for tensor in model.state_dict().values(): "
                "torch.distributed.broadcast(tensor, 0)."
            )


def own_generator(generator: torch.Generator | None, rank: int, device: torch.device) -> torch.Generator:
    """One for each rank: what is drawn for a data point must not be drawn for another as well."""
    place = torch.device("cpu") if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=place))
    return torch.Generator(device).manual_seed((seed + rank * 0x9E3779B97F4A7C15) % 2**63)
