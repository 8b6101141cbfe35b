"""Training procedures that use the posterior while they run: `marglik`, training by the marginal likelihood."""

from lapwing.training.marglik import Epoch, Hyper, Trained, adam, train

__all__ = ["Epoch", "Hyper", "Trained", "adam", "train"]
