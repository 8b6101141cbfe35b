"""Classification as a user of laplace-torch writes it: fit, tune the prior by the evidence, predict probabilities.

    python classification.py laplace      # or lapwing: the name of the package is all that changes

A second argument names a backend, as in `laplace BackPackGGN`. Prints JSON. `n_steps`
brings the Adam of laplace-torch to rest.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

import torch
from small_problems import average, load, numbers


def describe(la: Any, test: torch.Tensor) -> dict[str, Any]:
    """What the posterior says, as numbers."""
    out = {f"probabilities_{link}": la(test, link_approx=link) for link in ("probit", "bridge", "bridge_norm")}
    out["probabilities"] = la(test, pred_type="glm")
    for name in ("log_likelihood", "log_det_ratio", "scatter", "loss", "prior_precision"):
        out[name] = getattr(la, name)
    out["log_marginal_likelihood"] = la.log_marginal_likelihood()
    for name in ("n_data", "n_outputs", "n_params", "mean"):
        out[name] = getattr(la, name)
    return out


def main(name: str, backend: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    Laplace = import_module(name).Laplace
    if backend is not None:
        Laplace = partial(Laplace, backend=getattr(import_module(f"{name}.curvature"), backend))
    kron = {"bias": "separate"} if name == "lapwing" else {}
    model, loader, test = load("classification")
    generator = torch.Generator().manual_seed(2)
    out: dict[str, Any] = {}

    # the structure and the subset that laplace-torch takes when it is not told: last layer, kron
    la = Laplace(model, "classification", **kron)
    la.fit(loader)
    la.optimize_prior_precision(method="marglik", n_steps=400)
    out["default"] = describe(la, test)

    for subset in ("all", "last_layer"):
        for structure, options in (("full", {}), ("diag", {}), ("kron", kron)):
            la = Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure, **options)
            la.fit(loader)
            key = f"{subset}_{structure}"
            out[f"{key}_untuned"] = describe(la, test)
            if structure != "kron":
                out[f"{key}_untuned"]["H"] = la.H
                out[f"{key}_untuned"]["posterior_precision"] = la.posterior_precision
            la.optimize_prior_precision(method="marglik", n_steps=400)
            out[key] = describe(la, test)
            draws = {
                "weights": la.sample(5_000, generator=generator),
                "glm": la.functional_samples(test, n_samples=5_000, generator=generator),
                "glm_predictive": la.predictive_samples(test, n_samples=5_000, generator=generator),
                "nn_predictive": la.predictive_samples(test, pred_type="nn", n_samples=300, generator=generator),
            }
            out[f"draws_{key}"] = {kind: average(values) for kind, values in draws.items()}
            error = draws["glm_predictive"].std(0) / 5_000**0.5
            mc = la(test, pred_type="glm", link_approx="mc", n_samples=5_000)
            out[f"draws_{key}"]["mc"] = {"mean": numbers(mc), "error": numbers(error)}
            error = draws["nn_predictive"].std(0) / 300**0.5
            mc = la(test, pred_type="nn", link_approx="mc", n_samples=300)
            out[f"draws_{key}"]["nn_mc"] = {"mean": numbers(mc), "error": numbers(error)}

            state = BytesIO()
            torch.save(la.state_dict(), state)
            state.seek(0)
            again = Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure, **options)
            again.load_state_dict(torch.load(state))
            out[f"{key}_restored"] = describe(again, test)

    for structure, precisions in (("layerwise", 4), ("diag", 39)):
        la = Laplace(model, "classification", "all", "full", prior_precision=torch.linspace(0.5, 3.0, precisions))
        la.fit(loader)
        out[f"all_full_{structure}"] = describe(la, test)
    la = Laplace(model, "classification", "all", "kron", prior_precision=torch.linspace(0.5, 3.0, 4), **kron)
    la.fit(loader)
    out["all_kron_layerwise"] = describe(la, test)

    for structure in ("full", "diag"):
        indices = torch.LongTensor([1, 4, 12, 18, 22, 30, 36])
        la = Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=indices)
        la.fit(loader)
        la.optimize_prior_precision(method="marglik", n_steps=400)
        out[f"subnetwork_{structure}"] = describe(la, test)

    for structure, options in (("full", {}), ("kron", kron)):
        la = Laplace(model, "classification", "all", structure, temperature=0.5, prior_precision=3.0, **options)
        la.fit(loader)
        out[f"tempered_{structure}"] = describe(la, test)
    return numbers(out)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
