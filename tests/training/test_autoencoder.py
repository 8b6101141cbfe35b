"""LaplacianAutoencoder: the online update by hand, the law of draws, post-hoc fits, curvatures."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oracle
from lapwing import Laplace
from lapwing.errors import DataError, ModelError
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.tangent import Tangent
from lapwing.training import LaplacianAutoencoder
from lapwing.training.autoencoder import online
from lapwing.training.autoencoder.curvatures import of_batch

X = torch.rand(12, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def halves(outputs: int = 6) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    decoder = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return encoder, decoder


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(**options: Any) -> LaplacianAutoencoder:
    given: dict[str, Any] = {"generator": seeded()} | options
    return LaplacianAutoencoder(*halves(), **given)


def weights(*modules: nn.Module) -> Tensor:
    return torch.cat([nn.utils.parameters_to_vector(module.parameters()) for module in modules]).detach().clone()


def sgd(*modules: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr)


# -- the online update -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["mean", "draw"])
@pytest.mark.parametrize("rescale", [False, True])
def test_the_update_by_hand(at: str, rescale: bool) -> None:
    """Equations 11 and 64 step by step, with autograd and a dense oracle."""
    prior, start, forgetting, weight, temperature, lr = 0.7, 2.0, 0.1, 0.5, 1.5, 0.05
    model = made(
        curvature="exact",
        prior_precision=prior,
        start=start,
        forgetting=forgetting,
        weight=weight,
        rescale=rescale,
        temperature=temperature,
        at=at,
    )
    network = nn.Sequential(*halves())
    numbers = seeded()
    curvature = torch.full((model.space.size,), start * (len(X) if rescale else 1), dtype=torch.float64)
    for x in X.split(5):
        theta = weights(network)
        spread = (prior + curvature / temperature).rsqrt()
        draw = theta + torch.randn(1, len(theta), dtype=torch.float64, generator=numbers)[0] * spread
        moved = deepcopy(network)
        nn.utils.vector_to_parameters(draw, moved.parameters())
        loss = ((moved(x) - x) ** 2).sum() / 2 / len(x)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(moved.parameters()))])
        place = network if at == "mean" else moved
        added = oracle.ggn(place, Gaussian(), x, x).diagonal()
        curvature = (1 - forgetting) * curvature + weight * (len(X) / len(x) if rescale else 1) * added
        nn.utils.vector_to_parameters(theta - lr * gradient, network.parameters())
    told = model.fit(X.split(5), 1, optimizer=sgd(model.whole, lr=lr))
    assert [step.number for step in told] == [0, 1, 2]
    torch.testing.assert_close(weights(model.whole), weights(network), rtol=1e-9, atol=1e-12)
    precision = prior + curvature / temperature
    torch.testing.assert_close(model.posterior.variance(), 1 / precision, rtol=1e-9, atol=0)


@pytest.mark.parametrize("block", [16, 32, 48])
def test_draws_in_blocks_are_one_draw(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """110 weights: the last block is shorter than what torch draws at once, or longer than the others."""

    def trained() -> Tensor:
        encoder, decoder = halves(12)
        model = LaplacianAutoencoder(encoder, decoder, likelihood="learned_variance", generator=seeded())
        model.fit(X.split(5), 2, optimizer=sgd(model.whole, lr=0.01))
        return weights(model.whole)

    whole = trained()
    monkeypatch.setattr(online, "BLOCK", block)
    assert torch.equal(trained(), whole)


def test_weights_in_an_order_of_their_own_are_drawn_the_same() -> None:
    """A weight whose rows are not rows of memory, as of a layer that was transposed."""
    found = []
    for turned in (False, True):
        encoder, decoder = halves()
        if turned:
            decoder[2].weight = nn.Parameter(decoder[2].weight.detach().T.contiguous().T)  # pyright: ignore
        model = LaplacianAutoencoder(encoder, decoder, generator=seeded())
        model.fit(X.split(5), 2, optimizer=sgd(model.whole, lr=0.01))
        found.append(torch.cat([p.detach().flatten() for p in model.whole.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_an_infinite_curvature_changes_nothing() -> None:
    """float32, one linear layer each: residuals of 1e12 and gradients of 1e34 are finite, their squares are not."""
    encoder, decoder = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    nn.init.constant_(encoder.weight, 1e-10)
    nn.init.constant_(decoder.weight, 1e10)
    model = LaplacianAutoencoder(encoder, decoder, prior_precision=1e30, generator=seeded())
    model.fit([X.float()], 1, optimizer=sgd(model.whole, lr=0.0))
    before, variance = weights(model.whole), model.posterior.variance()
    with pytest.raises(DataError, match="epoch 0, batch 0: the curvature of the batch is NaN or infinite"):
        model.fit([1e12 * X.float()], 1, optimizer=sgd(model.whole, lr=1e-30))
    assert torch.equal(weights(model.whole), before)
    assert torch.equal(model.posterior.variance(), variance)


def test_the_first_draw_has_the_law_of_the_prior_and_later_ones_that_of_the_posterior() -> None:
    """4000 draws: variances within 4 standard errors (sqrt(2 / 4000) of each), means within 4 of theirs."""
    model = made(curvature="exact", prior_precision=4.0).fit_posthoc(X.split(6))
    posterior, n = model.posterior, 4000
    draws = posterior.sample(n, seeded(1))
    variance = 1 / (4 + oracle.ggn(nn.Sequential(*halves()), Gaussian(), X, X).diagonal())
    away = (draws.var(0) / variance - 1) / (2 / n) ** 0.5
    shift = (draws.mean(0) - weights(*halves())) / (variance / n).sqrt()
    assert float(away.abs().max()) < 4
    assert float(shift.abs().max()) < 4
    assert float(away.square().mean()) == pytest.approx(1.0, abs=4 * (2 / model.space.size) ** 0.5)


def test_the_released_setting_settles_near_500_times_the_data() -> None:
    model = LaplacianAutoencoder.released(*halves(), curvature="exact", generator=seeded())
    schedule = model.schedule
    assert (schedule.weight, schedule.rescale, schedule.forgetting, schedule.at) == (0.5, True, 1e-3, "draw")
    assert schedule.weight / schedule.forgetting == 500


def test_the_released_setting_begins_with_a_curvature_of_n() -> None:
    """After one batch of the N points: prior 1, .999 N of the start, half the curvature at the first draw."""
    encoder, decoder = halves()
    model = LaplacianAutoencoder.released(encoder, decoder, curvature="exact", generator=seeded())
    network = nn.Sequential(*halves())
    noise = torch.randn(1, model.space.size, dtype=torch.float64, generator=seeded())[0]
    nn.utils.vector_to_parameters(weights(network) + noise * (1 + len(X)) ** -0.5, network.parameters())
    model.fit([X], 1)
    expected = 1 + 0.999 * len(X) + oracle.ggn(network, Gaussian(), X, X).diagonal() / 2
    torch.testing.assert_close(1 / model.posterior.variance(), expected, rtol=1e-9, atol=0)


def test_defaults_are_the_source_s() -> None:
    schedule = made().schedule
    assert (schedule.forgetting, schedule.weight, schedule.rescale, schedule.temperature) == (1e-4, 1.0, False, 1.0)
    assert schedule.prior_precision + schedule.start == 1.0


class CoupledAbove(nn.Module):
    """Samples that see each other where outputs are large, as rounding has it at wild weights."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return x + len(x) * (x.detach().abs().max() > self.limit)


def test_samples_are_told_apart_at_the_mean_of_the_weights() -> None:
    encoder, decoder = halves()
    wild: dict[str, Any] = {"prior_precision": 1e-8, "generator": seeded()}
    model = LaplacianAutoencoder(encoder, nn.Sequential(decoder, CoupledAbove(100.0)), **wild)
    assert model.fit(X.split(5), 1)[0].loss > 1e4  # two shapes, the first of them at a wild draw
    model = LaplacianAutoencoder(encoder, nn.Sequential(decoder, CoupledAbove(0.0)), **wild)
    with pytest.raises(ModelError, match="epoch 0, batch 0: data point 0 gives another output alone"):
        model.fit(X.split(5), 1)


def test_training_lowers_the_loss_and_leaves_a_posterior() -> None:
    model = made(forgetting=0.01)
    told = model.fit(X.split(6), 30, optimizer=torch.optim.Adam(model.whole.parameters(), lr=0.03))
    assert sum(s.loss for s in told[-10:]) < 0.8 * sum(s.loss for s in told[:10])
    assert bool((model.posterior.variance() < 1).any())


def test_fit_goes_on_from_the_posterior_there_is() -> None:
    model = made(forgetting=0.0, curvature="exact", at="mean")
    model.fit([X], 1, optimizer=sgd(model.whole, lr=0.0))
    once = 1 / model.posterior.variance() - 1
    model.fit([X], 2, optimizer=sgd(model.whole, lr=0.0))
    torch.testing.assert_close(1 / model.posterior.variance() - 1, 3 * once, rtol=1e-9, atol=1e-9)


# -- post hoc ----------------------------------------------------------------------------------------------------------


def test_post_hoc_is_laplace() -> None:
    model = made(curvature="exact", prior_precision=2.0, temperature=0.5).fit_posthoc(X.split(5))
    network = nn.Sequential(*halves())
    la = Laplace(
        network, "regression", subset_of_weights="all", hessian_structure="diag", prior_precision=2.0, temperature=0.5
    )
    la.fit(DataLoader(TensorDataset(X, X), batch_size=5))
    torch.testing.assert_close(1 / model.posterior.variance(), la.posterior_precision, rtol=1e-9, atol=0)
    mean, variance = la(X, diagonal_output=True)
    found = model.reconstruct(X, method="glm")
    torch.testing.assert_close(found.mean, mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.variance, variance, rtol=1e-9, atol=0)


def test_plain_training_is_plain() -> None:
    model = made(curvature="exact")
    network = nn.Sequential(*halves())
    optimizer = sgd(network)
    for x in X.split(5) * 2:
        optimizer.zero_grad()
        (((network(x) - x) ** 2).sum() / 2 / len(x)).backward()
        optimizer.step()
    model.fit_posthoc(X.split(5), 2, optimizer=sgd(model.whole))
    torch.testing.assert_close(weights(model.whole), weights(network), rtol=1e-9, atol=1e-12)
    expected = 1 + oracle.ggn(network, Gaussian(), X, X).diagonal()
    torch.testing.assert_close(1 / model.posterior.variance(), expected, rtol=1e-9, atol=0)


def test_the_prior_is_tuned_to_where_the_evidence_is_largest() -> None:
    """The derivative of log Z in log prior_precision, by hand: (P - prior |theta|^2 - prior tr(inverse)) / 2 = 0."""
    model = made(curvature="exact").fit_posthoc(X.split(5), 50, tune_prior=True)
    prior, theta = model.schedule.prior_precision, weights(model.whole)
    assert prior != 1
    slope = len(theta) - prior * float(theta.square().sum()) - prior * float(model.posterior.variance().sum())
    assert abs(slope) < 1e-3 * len(theta)


# -- curvature ---------------------------------------------------------------------------------------------------------

LIKELIHOODS: dict[str, tuple[str | Likelihood, int]] = {
    "mse": ("mse", 6),
    "gaussian": (Gaussian(0.3), 6),
    "learned_variance": ("learned_variance", 12),
    "bernoulli": ("bernoulli", 6),
}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("curvature", ["sampled", "summed"])
def test_sampled_diagonals_are_unbiased(curvature: str, likelihood: str) -> None:
    """The mean of 200 draws is the exact diagonal within 5 standard errors in every entry."""
    given, outputs = LIKELIHOODS[likelihood]
    encoder, decoder = halves(outputs)
    options: dict[str, Any] = {"likelihood": given, "curvature": curvature, "prior_precision": 1.0}
    model = LaplacianAutoencoder(encoder, decoder, **options, generator=seeded(4))
    exact = oracle.ggn(nn.Sequential(encoder, decoder), model.likelihood, X, X).diagonal()
    here = Tangent(model.whole, model.space).at(X)
    arguments = here, model.likelihood, X, X, model.generator
    found = [of_batch(curvature, 1)(*arguments).diagonal() for _ in range(200)]
    draws = torch.stack(found)
    error = draws.std(0) / len(draws) ** 0.5
    assert float(((draws.mean(0) - exact).abs() / error.clamp_min(1e-12 * exact.max())).max()) < 5
    assert float(error.max()) > 0


@pytest.mark.parametrize("curvature", ["sampled", "summed", "exact", "propagated", "mixed", "bottleneck", "kron"])
def test_every_curvature_trains_and_predicts(curvature: str) -> None:
    model = made(curvature=curvature)
    told = model.fit(X.split(6), 2)
    assert len(told) == 4
    scores = model.ood_scores(X, 4)
    assert bool(torch.isfinite(scores.output_variance).all())
    assert bool((model.latent(X, 8).variance > 0).all())


def test_batches_of_online_curvature_are_those_of_the_estimator() -> None:
    """The sampled diagonal with the forward pass that there is, against the estimator with the same numbers."""
    for curvature in ("sampled", "summed"):
        online = made(curvature=curvature, samples=3, forgetting=0.0, at="mean", generator=seeded(2))
        post = made(curvature=curvature, samples=3, generator=seeded(2))
        torch.randn(1, online.space.size, dtype=torch.float64, generator=post.generator)  # the draw of the weights
        online.fit([X], 1, optimizer=sgd(online.whole, lr=0.0))
        post.fit_posthoc([X])
        torch.testing.assert_close(online.posterior.variance(), post.posterior.variance(), rtol=1e-9, atol=0)
