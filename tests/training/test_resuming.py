"""A run that is broken off and started again ends, bit for bit, where one that was not ends; a file of another run is
refused. The tuner serves a loop of one's own, with the numbers of `train`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing import estimate, marglik_training, training
from lapwing.errors import NotFittedError, OptionError, ParameterError, StorageError
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.priors import Prior
from lapwing.serialize import describe, pack_tree, unpack_tree
from lapwing.training import EvidenceTuner
from unchanged import unchanged

X = torch.linspace(-2, 2, 24).unsqueeze(1)
Y = torch.sin(2 * X) + 0.1 * torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
LABELS = (Y[:, 0] > 0).long()


def network(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(1, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, outputs))


def loader(targets: Tensor = Y, own: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(2) if own else None
    return DataLoader(TensorDataset(X, targets), batch_size=8, shuffle=True, generator=generator)


class Stops:
    """A loader that breaks off at the start of an epoch, as a kill would."""

    def __init__(self, inner: DataLoader, passes: int) -> None:
        self.inner, self.left = inner, passes
        self.generator = inner.generator

    def __iter__(self):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return iter(self.inner)


SGD = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.05, "momentum": 0.9}}
RUNS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer_kwargs": {"lr": 0.02}},
    "schedule": SGD | {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": 18}},
    "steps": SGD | {"scheduler_cls": torch.optim.lr_scheduler.MultiStepLR, "scheduler_kwargs": {"milestones": [5, 9]}},
    "lbfgs": {"optimizer_cls": torch.optim.LBFGS, "optimizer_kwargs": {"lr": 0.1, "max_iter": 3}},
    "drawn": {"optimizer_kwargs": {"lr": 0.02}, "estimator": "mc", "generator": True},
    "global": {"optimizer_kwargs": {"lr": 0.02}, "own": False},
}


def run(data: Any, path: Path | None, options: dict[str, Any], **others: Any) -> tuple[Any, nn.Module, Any, Any]:
    options = {"n_epochs": 6, "n_epochs_burnin": 2, "marglik_frequency": 2, "n_hypersteps": 3, **options, **others}
    generator = torch.Generator().manual_seed(7) if options.pop("generator", False) else None
    options.pop("own", None)
    model = network()
    torch.manual_seed(11)
    return marglik_training(model, data, "regression", "kron", generator=generator, checkpoint=path, **options)


@pytest.mark.parametrize("kind", list(RUNS))
def test_a_run_that_was_broken_off_ends_where_the_other_does(kind: str, tmp_path: Path) -> None:
    options, path = RUNS[kind], tmp_path / "run"
    own = options.get("own", True)
    la, model, evidences, losses = run(loader(own=own), None, options)
    # one pass counts the data; looks are passes too: it breaks off in epoch 4, after a look
    with pytest.raises(KeyboardInterrupt):
        run(Stops(loader(own=own), 5), path, options)
    assert describe(path)["metadata"]["kind"] == "training"
    found, again, others, more = run(loader(own=own), path, options)
    assert not path.exists()
    assert evidences == others
    assert losses == more
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(la.prior_precision, found.prior_precision)
    assert torch.equal(la.sigma_noise, found.sigma_noise)
    assert torch.equal(la.H.dense(), found.H.dense())


def test_a_callback_is_told_of_every_epoch_of_both_parts(tmp_path: Path) -> None:
    told: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        run(Stops(loader(), 5), tmp_path / "run", RUNS["adam"], callback=told.append)
    before = len(told)
    _, _, _, losses = run(loader(), tmp_path / "run", RUNS["adam"], callback=told.append)
    assert 0 < before < 6
    assert [epoch.number for epoch in told] == [1, 2, 3, 4, 5, 6]
    assert [epoch.loss for epoch in told] == losses
    assert [epoch.number for epoch in told if epoch.tuned is not None] == [2, 4, 6]


def test_a_finished_run_whose_file_is_left_only_ends(tmp_path: Path) -> None:
    path = tmp_path / "run"
    la, _, evidences, _ = run(loader(), None, RUNS["adam"])
    with pytest.raises(KeyboardInterrupt):  # all epochs and looks are done, and the fit of the posterior is not
        run(Stops(loader(), 1 + 6 + 3), path, RUNS["adam"])
    assert path.exists()
    found, _, others, _ = run(loader(), path, RUNS["adam"])
    assert evidences == others
    assert torch.equal(la.prior_precision, found.prior_precision)


def test_a_file_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(Stops(loader(), 4), path, RUNS["adam"])
    kept = path.read_bytes()
    for other, message in (
        ({"n_epochs": 7}, "n_epochs was 6 and is 7"),
        ({"optimizer_kwargs": {"lr": 0.01}}, "optimizer was .*0.02.* and is .*0.01"),
        ({"prior_structure": "scalar"}, "prior_structure"),
        ({"generator": True}, "generator's seed"),
    ):
        with pytest.raises(StorageError, match=message):
            run(loader(), path, RUNS["adam"], **other)
    with pytest.raises(StorageError, match=r"tensor 0\.weight"):
        marglik_training(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), loader(), "regression", checkpoint=path)
    assert path.read_bytes() == kept
    path.write_bytes(kept[:-20])
    with pytest.raises(StorageError, match="cannot be used"):
        run(loader(), path, RUNS["adam"])
    with pytest.raises(OptionError, match="checkpoint_every is 0"):
        run(loader(), tmp_path / "other", RUNS["adam"], checkpoint_every=0)


def test_states_come_back_as_they_were() -> None:
    state = {"a": [1, 2.5, None, ("x", True)], 3: {"t": torch.arange(3), "nested": [torch.ones(2), {}]}}
    description, tensors = pack_tree(state)
    back = unpack_tree(description, tensors)
    assert back["a"] == state["a"]
    assert list(back) == ["a", 3]
    assert torch.equal(back[3]["t"], torch.arange(3))
    assert isinstance(back[3]["nested"], list)


# -- a loop of one's own -----------------------------------------------------------------------------------------------


def by_hand(model: nn.Module, tuner: EvidenceTuner, data: Any, epochs: int, start: int = 0, cut: bool = False) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(start, epochs):
        for x, y in data:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) + tuner.penalty() if cut else tuner.loss(model(x), y)
            loss.backward()
            optimiser.step()
        tuner.step()


@pytest.mark.parametrize("likelihood", [Gaussian(), Categorical()], ids=["numbers", "classes"])
def test_a_loop_of_ones_own_is_that_of_train(likelihood: Any) -> None:
    data = [(X[:10], (Y if isinstance(likelihood, Gaussian) else LABELS)[:10])]
    outputs = 1 if isinstance(likelihood, Gaussian) else 2
    options = {"burn_in": 1, "every": 2, "hyper_steps": 4, "precision": 0.5}
    first, second, third = (nn.Linear(1, outputs) for _ in range(3))
    for other in (second, third):
        other.load_state_dict(first.state_dict())
    sgd = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.05}}
    trained = training.train(first, data, likelihood, epochs=6, **sgd, **options)
    tuner = EvidenceTuner(second, data, likelihood, **options)
    by_hand(second, tuner, data, 6)
    assert tuple(tuner.log_marginals) == trained.log_marginals
    assert torch.equal(tuner.best.tuned.prior.precisions, trained.prior.precisions)
    assert tuner.best.number == trained.best_epoch
    assert torch.equal(tuner.best.tuned.sigma, trained.sigma)
    tuner.restore()
    assert torch.equal(second.weight, first.weight)
    if outputs == 2:  # a loss of one's own and the prior's part
        again = EvidenceTuner(third, data, likelihood, **options)
        by_hand(third, again, data, 6, cut=True)
        assert again.log_marginals == pytest.approx(tuner.log_marginals, rel=1e-5)


def test_the_penalty_is_the_priors_part_at_unit_noise() -> None:
    model = nn.Linear(1, 1).double()
    tuner = EvidenceTuner(model, [(X.double(), Y.double())], Gaussian(), sigma=0.5, temperature=2.0, precision=0.7)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    part = 0.7 * theta @ theta / (2 * 24) * 0.25 * 2.0
    torch.testing.assert_close(tuner.penalty().detach(), part, rtol=1e-12, atol=0)
    f = model(X.double())
    constant = 0.25 * torch.log(torch.tensor(2 * torch.pi * 0.25, dtype=torch.float64)) / 2
    expected = (f - Y).square().sum() / (2 * 24) + constant + part
    torch.testing.assert_close(tuner.loss(f, Y.double()).detach(), expected.detach(), rtol=1e-7, atol=0)


def test_the_state_of_a_tuner_goes_on_in_another() -> None:
    data = [(X, LABELS)]
    whole, first, second = (nn.Linear(1, 2) for _ in range(3))
    first.load_state_dict(whole.state_dict())
    tuner = EvidenceTuner(whole, data, Categorical(), every=2, hyper_steps=3)
    by_hand(whole, tuner, data, 6)
    before = EvidenceTuner(first, data, Categorical(), every=2, hyper_steps=3)
    by_hand(first, before, data, 3)
    second.load_state_dict(first.state_dict())
    after = EvidenceTuner(second, data, Categorical(), every=2, hyper_steps=3)
    after.load_state_dict(before.state_dict())
    by_hand(second, after, data, 6, start=3)
    assert after.log_marginals == tuner.log_marginals
    assert torch.equal(after.prior.precisions, tuner.prior.precisions)
    assert after.best.number == tuner.best.number
    with pytest.raises(ParameterError, match="4 prior precisions"):
        after.load_state_dict(EvidenceTuner(nn.Sequential(whole, nn.Linear(2, 2)), data, Categorical()).state_dict())


def test_looks_are_taken_when_due_and_the_model_stands_still() -> None:
    model = network(2)
    tuner = EvidenceTuner(model, [(X, LABELS)], Categorical(), burn_in=2, every=3, hyper_steps=1)
    with pytest.raises(NotFittedError, match="no look"):
        tuner.restore()
    with unchanged(model):
        found = [tuner.step() for _ in range(7)]
    assert [number for number, tuned in enumerate(found, 1) if tuned is not None] == [3, 6]
    assert isinstance(tuner.prior, Prior)
    assert float(tuner.sigma) == 1


class Memory:
    """A keeper that has the snapshots of all epochs."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self.kept, self.saved = kept, []

    def load(self) -> Mapping[str, Any] | None:
        return self.kept

    def save(self, snapshot: Mapping[str, Any]) -> None:
        self.saved.append(copy.deepcopy(snapshot))


@pytest.mark.parametrize("drawn", [False, True])
def test_the_evidence_of_a_look_before_the_break_is_found_again_and_its_draws_count_for_nothing(drawn: bool) -> None:
    """No epoch is left, so that the evidence is evaluated once more, at the best weights."""
    ended = []
    keeper = Memory()
    for kept in (keeper, None):
        generator = torch.Generator().manual_seed(7) if drawn else None
        found = training.train(
            network(),
            loader(own=False),
            Gaussian(),
            estimator=estimate.kfac if drawn else estimate.kflr,
            epochs=4,
            hyper_steps=3,
            optimizer_kwargs={"lr": 0.02},
            generator=generator,
            keeper=kept or Memory(keeper.saved[-1]),
        )
        ended.append((found, None if generator is None else generator.get_state()))
    assert [each["epoch"] for each in keeper.saved] == [1, 2, 3, 4]
    (first, state), (again, other) = ended
    assert again.best_epoch == first.best_epoch
    assert again.losses == first.losses
    assert again.log_marginals == first.log_marginals
    assert torch.equal(again.evidence.mean, first.evidence.mean)
    if drawn:
        assert state is not None
        assert other is not None
        assert torch.equal(state, other)
        assert again.curvature.dense().shape == first.curvature.dense().shape
    else:
        torch.testing.assert_close(again.curvature.dense(), first.curvature.dense(), rtol=1e-4, atol=1e-5)
