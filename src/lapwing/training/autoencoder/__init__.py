"""Autoencoders with a posterior over their weights.

laplacian    `LaplacianAutoencoder`: training, uncertainty in latent and data space, and what it is used for
online       the update of weights and curvature, one draw of the weights per step
curvatures   the curvature of a batch, by name
parts        an autoencoder as one network, and its halves
moments      what is returned, and moments of draws
"""

from lapwing.training.autoencoder.laplacian import AutoencoderStep, LaplacianAutoencoder
from lapwing.training.autoencoder.moments import Latent, LogProb, Reconstruction, Scores

__all__ = ["AutoencoderStep", "LaplacianAutoencoder", "Latent", "LogProb", "Reconstruction", "Scores"]
