"""EvidenceCallback: Lightning's loop with it is a loop of one's own with the tuner; where Lightning is installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing.errors import OptionError
from lapwing.likelihoods import Categorical
from lapwing.training import EvidenceTuner, lightning_callback
from lapwing.training.lightning_callback import EvidenceCallback

X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
OPTIONS: dict[str, Any] = {"every": 2, "hyper_steps": 3, "precision": 2.0}


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=8)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


def test_without_lightning_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_callback, "Callback", object)
    with pytest.raises(OptionError, match="pip install lightning"):
        EvidenceCallback(Categorical())


def by_hand(epochs: int) -> tuple[nn.Module, EvidenceTuner]:
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = EvidenceTuner(model, loader(), Categorical(), **OPTIONS)
    for _ in range(epochs):
        for x, y in loader():
            optimiser.zero_grad()
            (nn.functional.cross_entropy(model(x), y) + tuner.penalty()).backward()
            optimiser.step()
        tuner.step()
    return model, tuner


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("resumed", [False, True])
def test_lightning_trains_as_a_loop_by_hand(resumed: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(epochs: int, callback: EvidenceCallback) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        options = {"max_epochs": epochs, "accelerator": "cpu", "default_root_dir": tmp_path, **quiet}
        return lightning.Trainer(callbacks=[callback], enable_checkpointing=False, **options)

    model, tuner = by_hand(6)
    module, callback, path = Module(), EvidenceCallback(Categorical(), restore_best=False, **OPTIONS), None
    if resumed:
        first = trainer(3, EvidenceCallback(Categorical(), restore_best=False, **OPTIONS))
        first.fit(module, loader())
        path = tmp_path / "half.ckpt"
        first.save_checkpoint(path)
        module = Module()
    trainer(6, callback).fit(module, loader(), ckpt_path=path)
    assert callback.tuner is not None
    assert callback.tuner.log_marginals == pytest.approx(tuner.log_marginals, rel=1e-5)
    torch.testing.assert_close(callback.tuner.prior.precisions, tuner.prior.precisions, rtol=1e-4, atol=0)
    for a, b in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert callback.tuner.best.number == tuner.best.number


@pytest.mark.filterwarnings("ignore")
def test_the_best_weights_are_put_back_and_a_network_inside_is_served() -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Inside(lightning.LightningModule):
        automatic_optimization = True

        def __init__(self) -> None:
            super().__init__()
            self.network, self.unused = network(), nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return 3 * nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.network.parameters(), lr=0.1 / 3)

    module = Inside()
    callback = EvidenceCallback(Categorical(), model=module.network, loader=loader(), scale=3.0, **OPTIONS)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(max_epochs=4, accelerator="cpu", callbacks=[callback], enable_checkpointing=False, **quiet).fit(
        module, loader()
    )
    model, tuner = by_hand(4)
    tuner.restore()
    for a, b in zip(module.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# -- Lightning's hooks, called in its order: also where it is not installed -------------------------------------------


class Stated(nn.Module):
    """A module of Lightning's, as far as the callback knows one."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.logged = network(), []

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def log(self, name: str, value: float) -> None:
        self.logged.append((name, value))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    if lightning_callback.Callback is object:
        monkeypatch.setattr(lightning_callback, "Callback", type("Callback", (), {}))


def driven(module: Stated, callback: EvidenceCallback, epochs: int, scale: float = 1.0, loaded: bool = True) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1 / scale)
    trainer = SimpleNamespace(train_dataloader=loader() if loaded else None)
    callback.on_train_start(trainer, module)
    for _ in range(epochs):
        for x, y in loader():
            optimiser.zero_grad()
            (scale * nn.functional.cross_entropy(module(x), y)).backward()
            callback.on_before_optimizer_step(trainer, module, optimiser)
            optimiser.step()
        callback.on_train_epoch_end(trainer, module)
    callback.on_train_end(trainer, module)


def assert_same(module: Stated, model: nn.Module) -> None:
    for a, b in zip(module.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("resumed", [False, True])
def test_its_hooks_train_as_a_loop_by_hand(resumed: bool) -> None:
    model, tuner = by_hand(6)
    module, callback = Stated(), EvidenceCallback(Categorical(), restore_best=False, **OPTIONS)
    assert callback.state_dict() == {}
    if resumed:
        first = EvidenceCallback(Categorical(), restore_best=False, **OPTIONS)
        driven(module, first, 3)
        callback.load_state_dict(first.state_dict())
    driven(module, callback, 3 if resumed else 6)
    assert callback.tuner is not None
    assert callback.tuner.epoch == 6
    assert callback.tuner.log_marginals == pytest.approx(tuner.log_marginals, rel=1e-5)
    assert module.logged == [("log_evidence", pytest.approx(value, rel=1e-5)) for value in tuner.log_marginals]
    assert_same(module, model)


@pytest.mark.usefixtures("hooks")
def test_a_state_of_nothing_is_no_state() -> None:
    callback = EvidenceCallback(Categorical(), **OPTIONS)
    callback.load_state_dict({})
    driven(Stated(), callback, 1)
    assert callback.tuner is not None
    assert callback.tuner.epoch == 1


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("restored", [False, True])
def test_its_hooks_serve_a_network_inside_a_loss_that_is_a_multiple_and_data_of_ones_own(restored: bool) -> None:
    module = Stated()
    options = OPTIONS | ({} if restored else {"restore_best": False})  # the best weights are put back unless told
    callback = EvidenceCallback(Categorical(), model=module.network, loader=loader(), scale=3.0, **options)
    driven(module, callback, 5, scale=3.0, loaded=False)
    model, tuner = by_hand(5)
    last = {name: value.clone() for name, value in model.state_dict().items()}
    tuner.restore()
    assert not all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    if not restored:
        model.load_state_dict(last)
    assert_same(module, model)
    assert callback.tuner is not None
    assert callback.tuner.objective.tangent.model is module.network


@pytest.mark.usefixtures("hooks")
def test_without_a_look_the_last_weights_stay() -> None:
    module, callback = Stated(), EvidenceCallback(Categorical(), **OPTIONS)
    callback.on_train_end(None, module)  # before it began
    driven(module, callback, 1)
    assert not module.logged
    assert_same(module, by_hand(1)[0])
