"""LaplacianAutoencoder: uncertainty against dense oracles, its uses, networks, runs that go on, bad input."""

from __future__ import annotations

from copy import deepcopy
from math import log, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oracle
from lapwing.errors import DataError, LikelihoodError, ModelError, NotFittedError, OptionError, StorageError
from lapwing.estimate import diagonal
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from lapwing.training import Continual, LaplacianAutoencoder
from lapwing.training.autoencoder.moments import LogProb, Spread
from unchanged import unchanged

X = torch.rand(12, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def halves(outputs: int = 6) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    decoder = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return encoder, decoder


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(outputs: int = 6, **options: Any) -> LaplacianAutoencoder:
    given: dict[str, Any] = {"generator": seeded(), "curvature": "exact"} | options
    return LaplacianAutoencoder(*halves(outputs), **given).fit_posthoc(X.split(6))


def dense(network: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian of a network in its own parameters, [B, C, P]."""
    names = dict(network.named_parameters())

    def one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(network, parameters, (row.unsqueeze(0),))[0].flatten()

    found = torch.func.vmap(torch.func.jacrev(one), (None, 0))({k: v.detach() for k, v in names.items()}, x)
    return torch.cat([found[name].flatten(2) for name in names], 2)


# -- linearised --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["exact", "kron"])
def test_linearised_moments_are_dense_products(curvature: str) -> None:
    model = fitted(curvature=curvature)
    encoder, decoder = halves()
    sigma = model.posterior.precision.to_matrix(-1)
    first = sum(p.numel() for p in encoder.parameters())
    of_code = dense(encoder, X)
    latent = model.latent(X, method="glm")
    expected = torch.einsum("b k p, p q, b l q -> b k l", of_code, sigma[:first, :first], of_code)
    torch.testing.assert_close(latent.covariance, expected, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(latent.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(latent.mean, encoder(X).detach(), rtol=1e-9, atol=0)
    whole = dense(nn.Sequential(encoder, decoder), X)
    found = model.reconstruct(X, method="glm")
    expected = torch.einsum("b c p, p q, b c q -> b c", whole, sigma, whole)
    torch.testing.assert_close(found.variance, expected, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.noise, torch.ones_like(X), rtol=1e-9, atol=0)
    z = encoder(X).detach()
    rows = dense(decoder, z)
    found = model.decode(z, method="glm")
    expected = torch.einsum("b c p, p q, b c q -> b c", rows, sigma[first:, first:], rows)
    torch.testing.assert_close(found.variance, expected, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.mean, decoder(z).detach(), rtol=1e-9, atol=0)


def test_linearised_moments_of_coins_and_of_a_learned_variance() -> None:
    model = fitted(likelihood="bernoulli")
    network = nn.Sequential(*halves())
    f, rows = network(X).detach(), dense(network, X)
    variance = torch.einsum("b c p, p, b c p -> b c", rows, model.posterior.variance(), rows)
    found, p = model.reconstruct(X, method="glm"), f.sigmoid()
    torch.testing.assert_close(found.mean, (f / (1 + pi / 8 * variance).sqrt()).sigmoid(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.variance, (p * (1 - p)) ** 2 * variance, rtol=1e-9, atol=0)
    model = fitted(12, likelihood="learned_variance")
    network = nn.Sequential(*halves(12))
    f, rows = network(X).detach(), dense(network, X)
    variance = torch.einsum("b c p, p, b c p -> b c", rows, model.posterior.variance(), rows)
    found = model.reconstruct(X, method="glm")
    torch.testing.assert_close(found.mean, f[:, :6], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.variance, variance[:, :6], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.noise, (f[:, 6:] + variance[:, 6:] / 2).exp(), rtol=1e-9, atol=0)


# -- sampled -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["mse", "bernoulli", "learned_variance"])
def test_sampled_moments_are_those_of_networks_at_drawn_weights(likelihood: str) -> None:
    outputs = 12 if likelihood == "learned_variance" else 6
    model = fitted(outputs, likelihood=likelihood)
    encoder, decoder = halves(outputs)
    network = nn.Sequential(encoder, decoder)

    def by_hand(module: nn.Module, x: Tensor) -> Tensor:
        draws, found = model.posterior.sample(20, seeded(7)), []
        for theta in draws:
            nn.utils.vector_to_parameters(theta, network.parameters())
            found.append(module(x).detach())
        return torch.stack(found)

    model.generator = seeded(7)
    codes, latent = by_hand(encoder, X), model.latent(X, 20)
    torch.testing.assert_close(latent.mean, codes.mean(0), rtol=1e-9, atol=1e-12)
    for row in range(len(X)):
        torch.testing.assert_close(latent.covariance[row], torch.cov(codes[:, row].mT), rtol=1e-9, atol=1e-12)
    z = torch.linspace(-2, 2, 6, dtype=torch.float64).reshape(3, 2)
    for module, x, ask in ((network, X, model.reconstruct), (decoder, z, model.decode)):
        model.generator = seeded(7)
        outs, found = by_hand(module, x), ask(x, 20)
        if likelihood == "bernoulli":
            mean, noise = outs.sigmoid(), outs.sigmoid() * (1 - outs.sigmoid())
        else:
            mean, noise = (outs, torch.ones_like(outs)) if outputs == 6 else (outs[..., :6], outs[..., 6:].exp())
        torch.testing.assert_close(found.mean, mean.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.variance, mean.var(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.noise, noise.mean(0), rtol=1e-9, atol=1e-12)


def test_sampled_and_linearised_moments_agree_where_the_posterior_is_narrow() -> None:
    """3000 draws at a prior precision of 1e6: variances within 5 standard errors, sqrt(2 / 3000) of each."""
    model = fitted(prior_precision=1e6)
    n = 3000
    for ask in (model.latent, model.reconstruct):
        ratio = ask(X, n).variance / ask(X, method="glm").variance
        assert float((ratio - 1).abs().max()) < 5 * (2 / n) ** 0.5


def test_log_prob_of_a_linear_model_is_known() -> None:
    """x -> w x with x = 1 twice: p(x) = N(x; m, 1 + v) in closed form, within 4 of its own standard errors."""
    encoder, decoder = nn.Linear(1, 1, bias=False).double(), nn.Identity()
    nn.init.constant_(encoder.weight, 0.4)
    x = torch.ones(2, 1, dtype=torch.float64)
    model = LaplacianAutoencoder(encoder, decoder, prior_precision=2.0, curvature="exact", generator=seeded(1))
    model.fit_posthoc([x])
    found, v = model.log_prob(x, 4000), 1 / 4
    exact = -0.5 * log(2 * pi * (1 + v)) - 0.36 / (2 * (1 + v))
    assert float((found.value - exact).abs().max()) < 4 * float(found.standard_error.max()) < 0.05
    bound = -0.5 * log(2 * pi) - (0.36 + v) / 2
    assert float((found.bound - bound).abs().max()) < 4 * float(found.bound_error.max()) < 0.05
    assert bool((found.bound < found.value).all())


def test_the_standard_error_of_log_prob_is_that_of_repetitions() -> None:
    """400 estimates from 200 draws each: their spread is what one of them says, within a tenth."""
    each = torch.randn(400, 200, 1, dtype=torch.float64, generator=seeded(2))
    found = [LogProb.of(draws) for draws in each]
    spread = float(torch.stack([one.value for one in found]).std())
    said = float(torch.stack([one.standard_error for one in found]).square().mean().sqrt())
    assert said == pytest.approx(spread, rel=0.1)


def test_moments_of_draws_in_parts() -> None:
    draws, spread = 100 + torch.randn(30, 4, 3, dtype=torch.float64, generator=seeded()), Spread()
    for part in draws.split((1, 7, 22)):
        spread.add(part)
    torch.testing.assert_close(spread.mean, draws.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(spread.variance, draws.var(0), rtol=1e-9, atol=0)


# -- uses --------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_single_methods_and_grow_away_from_the_data() -> None:
    model = fitted()
    model.measure_entropy(X.split(6), 50)
    assert model.entropy is not None
    n = 150
    scores, far = model.ood_scores(X, n), model.ood_scores(20 * X, n)
    single = model.log_prob(X, n)
    error = (single.standard_error**2 * 2).sqrt()
    assert bool(((scores.negative_log_likelihood + single.value).abs() < 5 * error).all())
    assert scores.typicality is not None
    torch.testing.assert_close(
        scores.typicality, (scores.negative_log_likelihood - model.entropy).abs(), rtol=1e-12, atol=0
    )
    ratio = scores.latent_variance / model.latent(X, n).variance.sum(1)
    assert float((ratio - 1).abs().max()) < 5 * 2 * (2 / n) ** 0.5
    assert bool((far.latent_variance > scores.latent_variance).all())
    assert bool((far.negative_log_likelihood > scores.negative_log_likelihood).all())
    assert float((model.typicality(X, n) - scores.typicality).abs().max()) < 1


def test_impute_keeps_the_known_part_and_looks_at_no_other() -> None:
    model = fitted()
    observed = torch.zeros_like(X, dtype=torch.bool)
    observed[:, :3] = True
    missing = torch.where(observed, X, float("nan"))
    found = model.impute(missing, observed, n=3, steps=2, average=2)
    assert found.shape == (3, *X.shape)
    assert torch.equal(found[:, :, :3], X[:, :3].expand(3, -1, -1))
    assert bool(torch.isfinite(found).all())
    assert bool((found[0, :, 3:] != found[1, :, 3:]).all())
    model.generator = seeded(9)
    one = model.impute(missing, observed[0], n=1, steps=1, average=1, fill=0.0)[0]
    state = torch.where(observed, X, 0.0)
    generator = seeded(9)
    network = nn.Sequential(*halves())
    for _ in range(2):
        theta = model.posterior.sample(1, generator)[0]
        nn.utils.vector_to_parameters(theta, network.parameters())
        state = torch.where(observed, X, network(state).detach())
    torch.testing.assert_close(one, state, rtol=1e-9, atol=1e-12)


def test_embed_and_sample() -> None:
    model = fitted()
    for ask in (model.embed, model.sample, model.log_prob, model.reconstruct, model.latent, model.ood_scores):
        given: Any = 3 if ask == model.sample else X
        first, again, other = (ask(given, generator=seeded(seed)) for seed in (1, 1, 2))
        if not isinstance(first, Tensor):
            first, again, other = (next(iter(vars(each).values())) for each in (first, again, other))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert model.embed(X, 5).shape == (5, 12, 2)
    assert model.sample(4, steps=1, average=1).shape == (4, 6)
    assert model.sample(2, shape=(6,)).shape == (2, 6)
    bare = LaplacianAutoencoder(*halves())
    with pytest.raises(NotFittedError, match="shape of the data"):
        bare.sample(2)


# -- networks ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def convolutional() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(1)
    encoder = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Residual(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True))),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    decoder = nn.Sequential(
        nn.Linear(2, 48),
        nn.ReLU(),
        nn.Unflatten(1, (3, 4, 4)),
        nn.Upsample(scale_factor=2),
        Residual(nn.Conv2d(3, 3, 3, padding=1)),
        nn.Conv2d(3, 1, 3, padding=1),
    )
    return encoder, decoder


@pytest.mark.parametrize("curvature", ["sampled", "summed", "propagated", "mixed"])
@pytest.mark.parametrize("training", [True, False])
def test_relu_pooling_normalisation_and_residuals(curvature: str, training: bool) -> None:
    encoder, decoder = convolutional()
    encoder.train(training)
    images = torch.rand(6, 1, 8, 8, generator=seeded())
    model = LaplacianAutoencoder(encoder, decoder, curvature=curvature, generator=seeded())
    buffers = {name: value.clone() for name, value in model.whole.named_buffers()}
    modes = [module.training for module in model.whole.modules()]
    before = model.whole.state_dict()["encoder.0.weight"].clone()
    model.fit([images, images], 2)
    assert [module.training for module in model.whole.modules()] == modes
    assert all(torch.equal(value, buffers[name]) for name, value in model.whole.named_buffers())
    assert not torch.equal(before, model.whole.state_dict()["encoder.0.weight"])
    assert all(parameter.grad is None for parameter in model.whole.parameters())
    with unchanged(model.whole):
        scores = model.ood_scores(images, 3)
        assert model.reconstruct(images, 3).mean.shape == images.shape
        assert model.latent(images, method="glm").covariance.shape == (6, 2, 2)
        model.impute(images, images > 0.5, n=1, steps=1, average=1)
    assert bool(torch.isfinite(scores.latent_variance).all())


def test_a_flat_decoder_is_compared_with_flat_images() -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), nn.Linear(2, 16)
    images = torch.rand(5, 1, 4, 4)
    model = LaplacianAutoencoder(encoder, decoder, generator=seeded())
    model.fit(DataLoader(TensorDataset(images, torch.zeros(5)), batch_size=2), 1)
    assert model.impute(images, images > 0.5, n=2, steps=1).shape == (2, 5, 1, 4, 4)
    assert model.sample(3).shape == (3, 1, 4, 4)


class OneModel(nn.Module):
    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        encoder, self.back = halves()
        self.into, self.skip = encoder, skip

    def forward(self, x: Tensor) -> Tensor:
        found = self.back(self.into(x))
        return found + x if self.skip else found


def test_one_model_with_a_named_bottleneck_is_its_two_halves() -> None:
    model = OneModel()
    options: dict[str, Any] = {"bottleneck": "into", "example": X[:2]}
    found = LaplacianAutoencoder(model, **options, curvature="exact", generator=seeded())
    with unchanged(model):
        found.fit_posthoc(X.split(6))
    expected = fitted()
    torch.testing.assert_close(found.posterior.variance().sort()[0], expected.posterior.variance().sort()[0])
    z = torch.randn(3, 2, dtype=torch.float64, generator=seeded())
    with unchanged(model):
        for ask in ("latent", "reconstruct"):
            ours, theirs = (getattr(each, ask)(X, method="glm") for each in (found, expected))
            torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(
            found.decode(z, method="glm").variance, expected.decode(z, method="glm").variance, rtol=1e-9, atol=1e-14
        )
        assert bool(torch.isfinite(found.ood_scores(X, 3).latent_variance).all())
    found.fit(X.split(6), 1)
    with pytest.raises(ModelError, match="a way around 'into'"):
        LaplacianAutoencoder(OneModel(skip=True), **options)
    with pytest.raises(ModelError, match="no submodule 'middle'"):
        LaplacianAutoencoder(model, bottleneck="middle", example=X)
    with pytest.raises(ModelError, match="latent points have shape"):
        found.decode(torch.zeros(2, 3, dtype=torch.float64), 3)


def test_skip_connections_around_the_bottleneck_train_as_two_modules_do() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep, self.short = nn.Linear(2, 6).double(), nn.Linear(2, 6).double()

        def forward(self, z: Tensor) -> Tensor:
            return self.deep(z.relu()) + self.short(z)

    torch.manual_seed(0)
    model = LaplacianAutoencoder(halves()[0], Skipping(), generator=seeded())
    assert len(model.fit(X.split(4), 2)) == 6


# -- runs that go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["sampled", "kron"])
def test_a_run_that_is_broken_off_ends_bit_for_bit_where_it_would_have(curvature: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"

    def run(stop: int | None, checkpoint: Path | None) -> LaplacianAutoencoder:
        model = LaplacianAutoencoder(*halves(), curvature=curvature, generator=seeded(), rescale=True)
        loader = DataLoader(TensorDataset(X), batch_size=5, shuffle=True, generator=seeded(1))

        def broken(step: Any) -> None:
            if step.number == stop:
                raise KeyboardInterrupt

        model.fit(loader, 4, checkpoint=checkpoint, checkpoint_every=2, callback=broken)
        return model

    whole = run(None, None)
    with pytest.raises(KeyboardInterrupt):
        run(7, path)
    assert path.exists()
    again = run(None, path)
    assert not path.exists()
    for a, b in zip(whole.whole.parameters(), again.whole.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.posterior.variance(), again.posterior.variance())


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"

    def stop(step: Any) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LaplacianAutoencoder(*halves()).fit([X], 5, checkpoint=path, checkpoint_every=1, callback=stop)
    with pytest.raises(StorageError, match=r"^the checkpoint is of another run: forgetting was 0\.0001 and is 0\.5\."):
        LaplacianAutoencoder(*halves(), forgetting=0.5).fit([X], 5, checkpoint=path)
    with pytest.raises(StorageError, match="curvature was sampled and is exact"):
        LaplacianAutoencoder(*halves(), curvature="exact").fit([X], 5, checkpoint=path)
    with pytest.raises(StorageError, match="online was True and is False"):
        LaplacianAutoencoder(*halves()).fit_posthoc([X], 5, checkpoint=path)
    with pytest.raises(StorageError, match=r"likelihood was Gaussian\(.*sigma=1\.0\) and is Gaussian\(.*0\.1\)"):
        LaplacianAutoencoder(*halves(), likelihood=Gaussian(0.1)).fit([X], 5, checkpoint=path)
    other = LaplacianAutoencoder(*halves())
    with pytest.raises(StorageError, match="optimizer was Adam and is SGD"):
        other.fit([X], 5, checkpoint=path, optimizer=torch.optim.SGD(other.whole.parameters(), lr=0.1))
    with pytest.raises(StorageError, match="scheduler was None and is StepLR"):
        other.fit([X], 5, checkpoint=path, scheduler=stepped)


def stepped(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)


@pytest.mark.parametrize("scheduler", [stepped, plateau])
def test_a_schedule_of_learning_rates_takes_a_step_per_epoch(scheduler: Any) -> None:
    """Plain training by hand with batches of 5, 5 and 2: the plateau is told the mean over data points."""
    model = LaplacianAutoencoder(*halves(), curvature="exact")
    ours = torch.optim.SGD(model.whole.parameters(), lr=0.2)
    model.fit_posthoc(X.split(5), 4, optimizer=ours, scheduler=scheduler)
    network = nn.Sequential(*halves())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    rate = scheduler(optimizer)
    for _ in range(4):
        total = 0.0
        for x in X.split(5):
            optimizer.zero_grad()
            loss = -Gaussian().log_prob(network(x), x).sum() / len(x)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        rate.step(total / len(X)) if scheduler is plateau else rate.step()
    assert ours.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1
    for a, b in zip(model.whole.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_schedule_is_told_the_mean_loss_of_the_data_points() -> None:
    """Batches of 5, 5 and 2, and a step too small to change anything."""
    told = []

    class Listening(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            told.append(float(metrics))
            super().step(metrics)

    model = LaplacianAutoencoder(*halves(), curvature="exact")
    still = torch.optim.SGD(model.whole.parameters(), lr=1e-30)
    model.fit_posthoc(X.split(5), 2, optimizer=still, scheduler=Listening)
    expected = -Gaussian().log_prob(model.whole(X), X).sum().item() / len(X)
    assert told == pytest.approx([expected, expected], rel=1e-12)


# -- plain training ----------------------------------------------------------------------------------------------------


def normalised() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 2))
    return encoder.double(), halves()[1]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_post_hoc_training_is_in_train_mode_and_its_curvature_in_eval_mode() -> None:
    encoder, decoder = normalised()
    encoder[3].p = 0.0  # without random numbers, to follow by hand
    network = deepcopy(nn.Sequential(encoder, decoder)).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for x in X.split(4) * 2:
        optimizer.zero_grad()
        (((network(x) - x) ** 2).sum() / 2 / len(x)).backward()
        optimizer.step()
    encoder.eval()
    model = LaplacianAutoencoder(encoder, decoder, curvature="exact")
    modes = [module.training for module in model.whole.modules()]
    model.fit_posthoc(X.split(4), 2, optimizer=torch.optim.SGD(model.whole.parameters(), lr=0.05))
    assert [module.training for module in model.whole.modules()] == modes
    ours = nn.Sequential(encoder, decoder).state_dict()
    for name, theirs in network.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-9, atol=1e-12)
    assert int(encoder[1].num_batches_tracked) == 6
    expected = 1 + oracle.ggn(network.eval(), Gaussian(), X, X).diagonal()
    torch.testing.assert_close(1 / model.posterior.variance(), expected, rtol=1e-9, atol=0)


def test_a_frozen_normalisation_stays_frozen_and_modes_come_back_after_an_error() -> None:
    encoder, decoder = normalised()
    encoder[1].eval()
    model = LaplacianAutoencoder(encoder, decoder, generator=seeded())
    modes = [module.training for module in model.whole.modules()]
    outside = torch.random.get_rng_state()
    model.fit_posthoc([X], 2)
    assert torch.equal(torch.random.get_rng_state(), outside)  # dropout followed the generator
    assert int(encoder[1].num_batches_tracked) == 0
    with pytest.raises(DataError, match="epoch 0, batch 1"):
        model.fit_posthoc([X, X * float("nan")], 1)
    assert [module.training for module in model.whole.modules()] == modes


@pytest.mark.parametrize("scheduler", [None, stepped, plateau])
def test_plain_training_with_dropout_goes_on_bit_for_bit(scheduler: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"

    def run(stop: int | None, checkpoint: Path | None) -> LaplacianAutoencoder:
        model = LaplacianAutoencoder(*normalised(), generator=seeded())
        loader = DataLoader(TensorDataset(X), batch_size=4, shuffle=True)

        def broken(step: Any) -> None:
            if step.number == stop:
                raise KeyboardInterrupt

        options: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_every": 1, "callback": broken}
        return model.fit_posthoc(loader, 4, scheduler=scheduler, **options)

    whole = run(None, None)
    for stop in (5, 7):  # at the end of an epoch, and within one
        with pytest.raises(KeyboardInterrupt):
            run(stop, path)
        again = run(None, path)
        for a, b in zip(whole.whole.state_dict().values(), again.whole.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(whole.posterior.variance(), again.posterior.variance())


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["sampled", "kron"])
def test_what_was_saved_says_and_learns_the_same(curvature: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = LaplacianAutoencoder(
        *halves(), curvature=curvature, likelihood=Gaussian(0.3), start=0.5, generator=seeded()
    )
    model.fit(X.split(6), 2)
    model.measure_entropy([X], 5)
    model.save(path)
    other = LaplacianAutoencoder.load(path, *halves(), generator=seeded(8))
    assert (other.schedule, other.curvature, other.entropy) == (model.schedule, curvature, model.entropy)
    for each in (model, other):
        each.fit(X.split(6), 1, optimizer=torch.optim.SGD(each.whole.parameters(), lr=0.01))
    assert torch.equal(model.posterior.variance(), other.posterior.variance())
    assert torch.equal(model.posterior.mean, other.posterior.mean)
    assert torch.equal(model.sample(2), other.sample(2))
    assert torch.equal(model.ood_scores(X, 3).output_variance, other.ood_scores(X, 3).output_variance)


def test_one_model_with_a_bottleneck_is_saved_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = LaplacianAutoencoder(OneModel(), bottleneck="into", example=X, curvature="exact").fit_posthoc([X])
    model.save(path)
    found = LaplacianAutoencoder.load(path, OneModel())
    z = torch.randn(3, 2, dtype=torch.float64, generator=seeded())
    assert torch.equal(found.decode(z, method="glm").variance, model.decode(z, method="glm").variance)
    with pytest.raises(StorageError, match="one model with the bottleneck 'into'; expected the same modules"):
        LaplacianAutoencoder.load(path, *halves())


def test_files_of_something_else_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path, bare = tmp_path / "model.safetensors", LaplacianAutoencoder(*halves())
    with pytest.raises(NotFittedError, match="no posterior to save yet"):
        bare.save(path)
    bare.fit([X], 1)
    bare.save(path)
    larger = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double(), halves()[1]
    for encoder, decoder in (larger, halves()):
        before = tensors(nn.Sequential(encoder, decoder))
        given: dict[str, Any] = {} if encoder is larger[0] else {"generator": seeded()}
        expected = r"'encoder\.0\.weight' is \(4, 6\)" if encoder is larger[0] else "generator is given"
        with pytest.raises(StorageError, match=expected):
            LaplacianAutoencoder.load(path, encoder, decoder, **given)
        for name, value in nn.Sequential(encoder, decoder).state_dict().items():
            assert torch.equal(value, before[name])
    with pytest.raises(StorageError, match="likelihood is given"):
        LaplacianAutoencoder.load(path, *halves(), likelihood=Gaussian())
    with pytest.raises(StorageError, match="an encoder and a decoder; expected the same modules"):
        LaplacianAutoencoder.load(path, OneModel())
    continual = Continual(nn.Linear(1, 1), "regression")
    continual.learn([(torch.ones(2, 1), torch.ones(2, 1))], epochs=1)
    continual.save(path)
    with pytest.raises(StorageError, match="holds 'continual'; expected 'autoencoder'"):
        LaplacianAutoencoder.load(path, *halves())
    path.write_bytes(b"nothing")
    with pytest.raises(StorageError):
        LaplacianAutoencoder.load(path, *halves())


def test_a_curvature_of_one_s_own_is_given_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = LaplacianAutoencoder(*halves(), curvature=diagonal)
    model.fit_posthoc([X]).save(path)
    with pytest.raises(StorageError, match="curvature is not given"):
        LaplacianAutoencoder.load(path, *halves())
    found = LaplacianAutoencoder.load(path, *halves(), curvature=diagonal)
    assert torch.equal(found.posterior.variance(), model.posterior.variance())


def test_a_nan_batch_is_named_and_changes_nothing() -> None:
    model = LaplacianAutoencoder(*halves(), generator=seeded())
    bad = X.clone()
    bad[2, 1] = float("nan")
    seen: list[Tensor] = []

    def note(step: Any) -> None:
        seen.append(torch.cat([p.detach().flatten() for p in model.whole.parameters()]))

    with pytest.raises(DataError, match="epoch 0, batch 1"):
        model.fit([X, bad, X], 2, callback=note)
    assert len(seen) == 1
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.whole.parameters()]), seen[0])
    variance = model.posterior.variance()
    assert bool(torch.isfinite(variance).all())


# -- bad input ---------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"likelihood": "mae"}, LikelihoodError, "unknown likelihood 'mae'"),
    ({"likelihood": Categorical()}, LikelihoodError, "the likelihood is Categorical"),
    ({"curvature": "fisher"}, OptionError, "unknown curvature 'fisher'"),
    ({"curvature": 3}, OptionError, "curvature is 3"),
    ({"samples": 0}, OptionError, "samples is 0"),
    ({"curvature": "exact", "samples": 2}, OptionError, "draws nothing"),
    ({"prior_precision": -1.0}, OptionError, "prior_precision is -1.0"),
    ({"prior_precision": 0.0}, OptionError, "both 0"),
    ({"start": float("nan")}, OptionError, "start is nan"),
    ({"forgetting": 1.0}, OptionError, "forgetting is 1.0"),
    ({"weight": 0}, OptionError, "weight is 0"),
    ({"temperature": 0.0}, OptionError, "temperature is 0.0"),
    ({"rescale": 2}, OptionError, "rescale is 2"),
    ({"at": "mode"}, OptionError, "at is 'mode'"),
    ({"points": 0}, OptionError, "points is 0"),
    ({"bottleneck": "0"}, OptionError, "an encoder and a decoder, or one model"),
]


MISTYPED = ("curvature is 3", "rescale is 2")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [pytest.param(*each, id=each[2], marks=pytest.mark.mistyped if each[2] in MISTYPED else ()) for each in WRONG],
)
def test_wrong_options_are_said(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        LaplacianAutoencoder(*halves(), **options)


def test_wrong_calls_are_said() -> None:
    bare = LaplacianAutoencoder(*halves())
    with pytest.raises(NotFittedError, match="no posterior yet"):
        bare.latent(X)
    with pytest.raises(NotFittedError, match="no posterior yet"):
        bare.ood_scores(X)
    model = fitted()
    with pytest.raises(NotFittedError, match="measure_entropy"):
        model.typicality(X)
    assert model.ood_scores(X, 2).typicality is None
    with pytest.raises(OptionError, match="unknown method 'mc'"):
        model.latent(X, method="mc")
    with pytest.raises(OptionError, match="samples is 1; expected a whole number >= 2"):
        model.reconstruct(X, 1)
    with pytest.raises(OptionError, match="n is 0"):
        model.embed(X, 0)
    with pytest.raises(DataError, match=r"observed is torch\.float64"):
        model.impute(X, X)
    with pytest.raises(DataError, match="observed has shape"):
        model.impute(X, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ModelError, match="as many entries"):
        LaplacianAutoencoder(*halves(5)).fit([X], 1)
    with pytest.raises(LikelihoodError, match="even number"):
        LaplacianAutoencoder(*halves(5), likelihood="learned_variance").fit([X], 1)
    with pytest.raises(DataError, match="no batch"):
        bare.fit([], 1)
    with pytest.raises(DataError, match="no batch"):
        bare.fit_posthoc([])
    with pytest.raises(DataError, match="read only once"):
        bare.fit(iter([X]), 2)
    with pytest.raises(OptionError, match="epochs is 0"):
        bare.fit([X], 0)
    with pytest.raises(OptionError, match="LBFGS"):
        bare.fit([X], 1, optimizer=torch.optim.LBFGS(bare.whole.parameters()))
    with pytest.raises(OptionError, match=r"does not hold the parameter 'encoder\.0\.weight'"):
        bare.fit([X], 1, optimizer=torch.optim.SGD(halves()[0].parameters(), lr=0.1))
    with pytest.raises(OptionError, match="scheduler is or makes a NoneType"):
        bare.fit([X], 1, scheduler=lambda optimizer: None)
    with pytest.raises(DataError, match="batch 0: the inputs are str"):
        bare.fit(["x"], 1)


def test_objects_are_taken_as_they_are() -> None:
    assert fitted(likelihood=Gaussian(0.1)).reconstruct(X, 2).noise.max() == pytest.approx(0.01)
    assert isinstance(fitted(likelihood=Bernoulli()).likelihood, Bernoulli)
    assert isinstance(fitted(12, likelihood=HeteroscedasticGaussian()).likelihood, HeteroscedasticGaussian)
    network = nn.Sequential(*halves())
    exact = 1 + oracle.ggn(network, Gaussian(0.1), X, X).diagonal()
    torch.testing.assert_close(1 / fitted(likelihood=Gaussian(0.1)).posterior.variance(), exact, rtol=1e-9, atol=0)
