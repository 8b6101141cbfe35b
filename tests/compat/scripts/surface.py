"""Every public method and attribute that scripts for laplace-torch touch: the shapes of what they return.

    python surface.py laplace             # or lapwing

Prints JSON: a shape for a tensor, a list for a tuple, a number or a string as it is, and a type's name for the rest.
What raises in one library is left out of its answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from small_problems import load

SUBNETWORK = [1, 4, 7, 9, 12, 18, 20, 22]
CLASSES = {
    "FullLaplace": {},
    "DiagLaplace": {},
    "KronLaplace": {},
    "FullLLLaplace": {},
    "DiagLLLaplace": {},
    "KronLLLaplace": {},
    "FullSubnetLaplace": {"subnetwork_indices": torch.LongTensor(SUBNETWORK)},
    "DiagSubnetLaplace": {"subnetwork_indices": torch.LongTensor(SUBNETWORK)},
    "FunctionalLaplace": {"n_subset": 20},
    "FunctionalLLLaplace": {"n_subset": 20},
}
ATTRIBUTES = [
    "H",
    "mean",
    "mean_subnet",
    "n_params",
    "n_params_subnet",
    "n_layers",
    "n_data",
    "n_outputs",
    "likelihood",
    "loss",
    "temperature",
    "enable_backprop",
    "prior_mean",
    "prior_precision",
    "prior_precision_diag",
    "sigma_noise",
    "scatter",
    "log_likelihood",
    "log_det_ratio",
    "log_det_prior_precision",
    "log_det_posterior_precision",
    "posterior_precision",
    "posterior_scale",
    "posterior_covariance",
    "posterior_variance",
    "gp_kernel_prior_variance",
]


def shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape)}
    if isinstance(value, tuple | list):
        return [shape(item) for item in value]
    if isinstance(value, bool | int | float | str):
        return value
    return {"type": type(value).__name__}


def calls(la: Any, x: torch.Tensor, jacobians: torch.Tensor) -> dict[str, Callable[[], Any]]:
    theta = la.mean if isinstance(la.mean, torch.Tensor) else torch.zeros(())
    functional = type(la).__name__.startswith("Functional")
    glm = "gp" if functional else "glm"
    return {
        "__call__": lambda: la(x),
        "__call__ pred_type": lambda: la(x, pred_type=glm),
        "__call__ joint": lambda: la(x, joint=True),
        "__call__ diagonal_output": lambda: la(x, diagonal_output=True),
        "__call__ joint diagonal_output": lambda: la(x, joint=True, diagonal_output=True),
        "__call__ mc": lambda: la(x, link_approx="mc", n_samples=6),
        "__call__ mc diagonal_output": lambda: la(x, link_approx="mc", n_samples=6, diagonal_output=True),
        "__call__ bridge": lambda: la(x, link_approx="bridge"),
        "__call__ bridge_norm": lambda: la(x, link_approx="bridge_norm"),
        "__call__ nn": lambda: la(x, pred_type="nn", link_approx="mc", n_samples=6),
        "__call__ fitting": lambda: la(x, fitting=True),
        "predictive": lambda: la.predictive(x, glm, "probit", 6),
        "predictive_moments": lambda: la.predictive_moments(x),
        "predictive_moments joint": lambda: la.predictive_moments(x, joint=True),
        "sample": lambda: la.sample(6),
        "sample default": lambda: la.sample(),
        "functional_samples": lambda: la.functional_samples(x, n_samples=6),
        "functional_samples default": lambda: la.functional_samples(x),
        "functional_samples diagonal_output": lambda: la.functional_samples(x, n_samples=6, diagonal_output=True),
        "functional_samples nn": lambda: la.functional_samples(x, pred_type="nn", n_samples=6),
        "predictive_samples": lambda: la.predictive_samples(x, n_samples=6),
        "predictive_samples nn": lambda: la.predictive_samples(x, pred_type="nn", n_samples=6),
        "functional_variance": lambda: la.functional_variance(jacobians),
        "functional_covariance": lambda: la.functional_covariance(jacobians),
        "functional_variance_fast": lambda: la.functional_variance_fast(x),
        "log_marginal_likelihood": lambda: la.log_marginal_likelihood(),
        "log_prob": lambda: la.log_prob(theta),
        "log_prob unnormalised": lambda: la.log_prob(theta, normalized=False),
        "square_norm": lambda: la.square_norm(theta),
    }


def survey(la: Any, x: torch.Tensor, jacobians: torch.Tensor) -> dict[str, Any]:
    found = {}
    for name in ATTRIBUTES:
        try:
            found[name] = shape(getattr(la, name))
        except Exception:
            continue
    for name, call in calls(la, x, jacobians).items():
        try:
            found[name] = shape(call())
        except Exception:
            continue
    for structure in ("scalar", "layerwise", "diag"):
        try:
            la.optimize_prior_precision(prior_structure=structure)
            found[f"optimize_prior_precision {structure}"] = [shape(la.prior_precision), shape(la(x))]
        except Exception:
            continue
    return found


def main(name: str) -> dict[str, Any]:
    package = import_module(name)
    out = {}
    for kind in ("regression", "classification"):
        for class_name, options in CLASSES.items():
            model, loader, x = load(kind)
            la = getattr(package, class_name)(model, kind, **options)
            la.fit(loader)
            rows = [[torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in o] for o in model(x)]
            flat = torch.stack([torch.stack([torch.cat([g.flatten() for g in grads]) for grads in r]) for r in rows])
            if "LL" in class_name:
                flat = flat[..., -sum(p.numel() for p in model[-1].parameters()) :]
            if "Subnet" in class_name:
                flat = flat[..., options["subnetwork_indices"]]
            out[f"{class_name} {kind}"] = survey(la, x, flat)
    return out


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
