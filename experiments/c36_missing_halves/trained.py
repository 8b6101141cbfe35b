"""Autoencoders of digits by name, trained alike: the baselines, and the Laplacian one after training and online.

    model = trained("VAE", data, config)       the same first weights (where layers are the same), batches and epochs

config has "seed", "hidden", "batch" and "epochs".
"""

from __future__ import annotations

from typing import Any

import torch
from autoencoders import BASELINES, SETTINGS, Architecture, Baseline, Images, Shuffled, train

from lapwing.training import LaplacianAutoencoder

POSTHOC, PAPER, RELEASED, ONE_SUM = "LAE, post-hoc", "LAE, online", "LAE, online, released", "LAE, online, one sum"
ONLINE = {PAPER: "online, paper", RELEASED: "online, released", ONE_SUM: "online, one sum"}
"""By the names of `autoencoders.SETTINGS`."""
LAPLACIAN = (POSTHOC, *ONLINE)


def trained(name: str, data: Images, config: dict[str, Any]) -> Baseline | LaplacianAutoencoder:
    torch.manual_seed(config["seed"])
    shape = Architecture("dense", tuple(config["hidden"]))
    generator = torch.Generator().manual_seed(config["seed"])
    batches = Shuffled(data.train, config["batch"], generator)
    if name in BASELINES:
        return train(BASELINES[name](shape), batches, config["epochs"], generator=generator)
    model = SETTINGS[ONLINE.get(name, "online, paper")](shape.encoder(), shape.decoder(), generator=generator)
    if name == POSTHOC:
        return model.fit_posthoc(batches, config["epochs"], tune_prior=True)
    model.fit(batches, config["epochs"])
    return model
