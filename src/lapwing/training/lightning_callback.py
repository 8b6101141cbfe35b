"""EvidenceCallback: prior precisions and noise by the evidence while Lightning trains; needs `lightning`.

    trainer = Trainer(callbacks=[EvidenceCallback(Categorical(), every=5)])

It is an `EvidenceTuner` at Lightning's hooks: the prior's gradient is added before every step of the optimiser, the
evidence is looked at after epochs that are due, and the best weights are put back in the end. Lightning's own
checkpoints hold its state. A look costs one curvature pass over the training data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lapwing.errors import OptionError
from lapwing.likelihoods import Likelihood
from lapwing.training.tuner import EvidenceTuner

try:
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
except ImportError:  # this module can be read without it, and its class says what is missing
    Callback = object


class EvidenceCallback(Callback):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """`options` are those of `EvidenceTuner`.

    The loss of the LightningModule is to be the mean over data points of -log p(y | f) at unit noise, without weight
    decay: `cross_entropy(f, y)`, or the half squared error summed over outputs. For one that is a multiple of it give
    `scale`, as 2 / outputs for `mse_loss`. `model` is the network that maps x to f, unless that is the module itself;
    `loader` yields the pairs (x, y), unless it is the trainer's. `log_evidence` is logged after every look.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        *,
        model: nn.Module | None = None,
        loader: Iterable[Any] | None = None,
        scale: float | int = 1.0,
        restore_best: bool = True,
        **options: Any,
    ) -> None:
        if Callback is object:
            raise OptionError(
                "EvidenceCallback needs Lightning, which is not installed; expected it. Install it with pip install "
                "lightning, or use lapwing.training.EvidenceTuner in a loop of your own."
            )
        super().__init__()
        self.likelihood, self.model, self.loader = likelihood, model, loader
        self.scale, self.restore_best, self.options = scale, restore_best, options
        self.tuner: EvidenceTuner | None = None
        self._state: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = pl_module if self.model is None else self.model
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.tuner = EvidenceTuner(model, loader, self.likelihood, **self.options)
        if self._state is not None:
            self.tuner.load_state_dict(self._state)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.tuner is not None
        self.tuner.add_penalty_gradient(self.scale)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.tuner is not None
        tuned = self.tuner.step()
        if tuned is not None:
            pl_module.log("log_evidence", float(tuned.log_marginal))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.restore_best and self.tuner is not None and self.tuner.looks.best is not None:
            self.tuner.restore()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tuner is None else self.tuner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state = state_dict or None
