"""Training procedures that use curvature: by the marginal likelihood, by Gauss-Newton steps, one task after another.

marginal_likelihood   `train`: weights and hyper-parameters in turn, and the record of a run
tuner                 `EvidenceTuner`: prior and noise by the evidence, for a loop of one's own
lightning_callback    `EvidenceCallback`: the same for Lightning, where it is installed
gauss_newton          `GaussNewton`: an optimiser by curvature, whose length and damping set themselves
damping, quadratic    its damping, and the loss with its quadratic at the present weights
stepped_run           its runs, which go on where they were broken off
autoencoder           `LaplacianAutoencoder`: weights are drawn while they are trained, and a posterior over them
continual             `Continual`: tasks one after the other, each under the posterior of those before it
avalanche_plugin      `ContinualPlugin`: the same for Avalanche, where it is installed
memory, importance    what is kept of the tasks so far; the importances of Synaptic Intelligence
quadratic_term        the quadratic of earlier tasks beside the loss of a new one, and its gradient, in place
task_run              the training of one task, which goes on where it was broken off
loop                  the training loop, which networks for tables use as well
resume, run_file      runs that go on where they were broken off, and their file
objective             what a run asks of the data: gradients for the weights, and the evidence
evidence_ascent       `adam`: steps of the hyper-parameters up the evidence
options               what a run is asked for, checked
train_mode            train mode and random numbers for the length of a run, and copies of the weights
"""

from lapwing.training.autoencoder import LaplacianAutoencoder
from lapwing.training.continual import Continual, Learned
from lapwing.training.evidence_ascent import Hyper, adam
from lapwing.training.gauss_newton import GaussNewton
from lapwing.training.loop import Epoch
from lapwing.training.marginal_likelihood import Trained, train
from lapwing.training.resume import Keeper
from lapwing.training.stepped_run import Step
from lapwing.training.tuner import EvidenceTuner

__all__ = [
    "Continual",
    "Epoch",
    "EvidenceTuner",
    "GaussNewton",
    "Hyper",
    "Keeper",
    "LaplacianAutoencoder",
    "Learned",
    "Step",
    "Trained",
    "adam",
    "train",
]
