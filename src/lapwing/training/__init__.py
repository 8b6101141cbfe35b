"""Training procedures that use the posterior while they run: `marglik`, training by the marginal likelihood.

marglik    `train`: weights and hyper-parameters in turn, and the record of a run
hyper      `adam`: steps of the hyper-parameters up the evidence
run        passes over the data: an epoch of steps on the weights, an evaluation of the evidence
options    what a run is asked for, checked
borrowed   modes, random numbers and weights of the model that a run is lent
"""

from lapwing.training.evidence_ascent import Hyper, adam
from lapwing.training.marginal_likelihood import Epoch, Trained, train

__all__ = ["Epoch", "Hyper", "Trained", "adam", "train"]
