"""Training procedures that use curvature: by the marginal likelihood, and by Gauss-Newton steps.

marginal_likelihood   `train`: weights and hyper-parameters in turn, and the record of a run
tuner                 `EvidenceTuner`: prior and noise by the evidence, for a loop of one's own
lightning_callback    `EvidenceCallback`: the same for Lightning, where it is installed
gauss_newton          `GaussNewton`: an optimiser by curvature, whose length and damping set themselves
damping, quadratic    its damping, and the loss with its quadratic at the present weights
stepped_run           its runs, which go on where they were broken off
autoencoder           `LaplacianAutoencoder`: weights are drawn while they are trained, and a posterior over them
loop                  the training loop, which networks for tables use as well
resume                runs that go on where they were broken off
objective             what a run asks of the data: gradients for the weights, and the evidence
evidence_ascent       `adam`: steps of the hyper-parameters up the evidence
options               what a run is asked for, checked
train_mode            train mode and random numbers for the length of a run, and copies of the weights
"""

from lapwing.training.autoencoder import LaplacianAutoencoder
from lapwing.training.evidence_ascent import Hyper, adam
from lapwing.training.gauss_newton import GaussNewton
from lapwing.training.loop import Epoch
from lapwing.training.marginal_likelihood import Trained, train
from lapwing.training.resume import Keeper
from lapwing.training.stepped_run import Step
from lapwing.training.tuner import EvidenceTuner

__all__ = [
    "Epoch",
    "EvidenceTuner",
    "GaussNewton",
    "Hyper",
    "Keeper",
    "LaplacianAutoencoder",
    "Step",
    "Trained",
    "adam",
    "train",
]
