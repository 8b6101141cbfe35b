"""marglik_training: weights and hyper-parameters in one run, by the names that users of laplace-torch know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from lapwing import training
from lapwing.errors import OptionError
from lapwing.estimate.data_pass import Batches
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.data import FEW, Pairs, peek
from lapwing.laplace.factory import Laplace
from lapwing.laplace.hyper import invariant_groups, precisions_of
from lapwing.laplace.names import PriorStructure, choose
from lapwing.laplace.training_checkpoint import training_file
from lapwing.laplace.wrapped import unwrapped
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature
from lapwing.params import ParamSpace
from lapwing.serialize.files import AnyPath
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import take


def marglik_training(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    hessian_structure: str = "kron",
    backend: type | None = None,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    scheduler_cls: type | None = None,
    scheduler_kwargs: Mapping[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float | int = 0.1,
    prior_structure: str = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float | int = 1.0,
    sigma_noise_init: float | int = 1.0,
    temperature: float | int = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    *,
    generator: torch.Generator | None = None,
    callback: Callable[[training.Epoch], object] | None = None,
    checkpoint: AnyPath | None = None,
    checkpoint_every: int = 1,
    **options: Any,
) -> tuple[BaseLaplace, nn.Module, list[float], list[float]]:
    """Trains the model in place by MAP steps and evidence steps in turn, and returns its fitted posterior.

    Returns (posterior, model, negative log evidence at every hyper-step, loss of every epoch). The model has the
    weights with the largest evidence, and every module the mode it came with. A scheduler takes a step per batch. The
    `callback` is told of every epoch: its number, loss, what the evidence led to, and whether the weights are the best.

    With a `checkpoint`, the path of a file, the run is kept there after every `checkpoint_every` epochs; called again
    in the same way, also in another process, it goes on from there, and ends bit for bit where it would have ended. Of
    random numbers torch's are kept, and not those that a model or a loader draws from `numpy` or `random`.
    """
    structure = choose(prior_structure, [known.value for known in PriorStructure], "prior_structure")
    for name, instead in (
        ("prior_precision", "prior_prec_init"),
        ("sigma_noise", "sigma_noise_init"),
        ("prior", "prior_prec_init"),
    ):
        if name in options:
            raise OptionError(f"{name} was given, which training finds; expected its start, {instead}.")
    model = unwrapped(model)
    laplace = Laplace(
        model,
        likelihood,
        "all",
        hessian_structure,
        backend=backend,
        temperature=temperature,
        enable_backprop=enable_backprop,
        dict_key_x=dict_key_x,
        dict_key_y=dict_key_y,
        **options,
    )
    keeper = None
    if checkpoint is not None:
        run = {
            "optimizer": (optimizer_cls, *sorted((optimizer_kwargs or {}).items())),
            "scheduler": (scheduler_cls, *sorted((scheduler_kwargs or {}).items())),
            "n_epochs": n_epochs,
            "lr_hyp": lr_hyp,
            "prior_structure": structure,
            "n_epochs_burnin": n_epochs_burnin,
            "n_hypersteps": n_hypersteps,
            "marglik_frequency": marglik_frequency,
            "prior_prec_init": prior_prec_init,
            "sigma_noise_init": sigma_noise_init,
            "temperature": temperature,
            "fix_sigma_noise": fix_sigma_noise,
            "generator's seed": None if generator is None else generator.initial_seed(),
        }
        keeper = training_file(checkpoint, laplace.setup, checkpoint_every, **run)
    space = ParamSpace.of(model)
    pairs = Pairs(train_loader, dict_key_y, space.device)
    if structure == "scale_invariant" and laplace.prior_groups is None:
        first, pairs = peek(pairs)
        laplace.prior_groups = invariant_groups(model, take(first[0], slice(0, FEW)))
    count = precisions_of(space, laplace.prior_groups)[structure]
    laplace.prior_precision = torch.full((count,), prior_prec_init, dtype=space.dtype, device=space.device)
    prior = laplace.hyper.base(laplace.space)

    def estimator(
        tangent: Tangent, distribution: Likelihood, batches: Batches, *, generator: torch.Generator | None = None
    ) -> Curvature:
        return laplace.recipe(tangent, distribution, batches, generator)

    with Progress(disable=not progress_bar) as progress:
        task = progress.add_task("training", total=n_epochs)

        def told(epoch: training.Epoch) -> None:
            progress.update(task, completed=epoch.number)
            if callback is not None:
                callback(epoch)

        trained = training.train(
            model,
            pairs,
            laplace.distribution,
            estimator=estimator,
            prior=prior,
            sigma=sigma_noise_init if laplace.has_noise else None,
            optimizer_cls=optimizer_cls,
            optimizer_kwargs=optimizer_kwargs,
            scheduler_cls=scheduler_cls,
            scheduler_kwargs=scheduler_kwargs,
            scheduler_per_batch=True,
            epochs=n_epochs,
            burn_in=max(0, n_epochs_burnin - 1),  # the epoch that ends the burn-in is evaluated
            every=marglik_frequency,
            hyper_steps=n_hypersteps,
            hyper_lr=lr_hyp,
            temperature=temperature,
            fixed_noise=fix_sigma_noise,
            noise_power=laplace.noise_power,
            generator=generator,
            callback=told,
            keeper=keeper,
            keep_every=checkpoint_every,
        )
    laplace.prior_precision = trained.prior.precisions
    if laplace.has_noise:
        laplace.sigma_noise = trained.sigma
    laplace.fit(pairs, generator=generator)
    if keeper is not None:
        keeper.remove()
    return laplace, model, [-value for value in trained.steps], list(trained.losses)
