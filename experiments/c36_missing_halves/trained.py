"""Autoencoders of digits by name, trained alike: the baselines, and the Laplacian one after training and online.

    model = trained("VAE", data, config)       the same first weights (where layers are the same), batches and epochs

config has "seed", "hidden", "batch" and "epochs". Online training as the paper sets it has half of the epochs plain
before it, and begins with the curvature found there: in a run of some thousand steps what comes of first draws from the
prior would not be forgotten (docs/autoencoders.md). "from the start" has no such beginning, nor has the released
setting.
"""

from __future__ import annotations

from typing import Any

import torch
from autoencoders import BASELINES, SETTINGS, Architecture, Baseline, Images, Shuffled, train

from lapwing.training import LaplacianAutoencoder

POSTHOC, ONLINE = "LAE, post-hoc", "LAE, online"
STARTED, RELEASED = "LAE, online from the start", "LAE, online, released"
SETTING = {STARTED: "online, paper", RELEASED: "online, released"}
"""By the names of `autoencoders.SETTINGS`."""


def trained(name: str, data: Images, config: dict[str, Any]) -> Baseline | LaplacianAutoencoder:
    torch.manual_seed(config["seed"])
    shape = Architecture("dense", tuple(config["hidden"]))
    generator = torch.Generator().manual_seed(config["seed"])
    batches = Shuffled(data.train, config["batch"], generator)
    if name in BASELINES:
        return train(BASELINES[name](shape), batches, config["epochs"], generator=generator)
    model = SETTINGS[SETTING.get(name, "online, paper")](shape.encoder(), shape.decoder(), generator=generator)
    if name == POSTHOC:
        return model.fit_posthoc(batches, config["epochs"], tune_prior=True)
    first = config["epochs"] // 2 if name == ONLINE else 0
    if first:
        model.fit_posthoc(batches, first)
    model.fit(batches, config["epochs"] - first)
    return model
