"""The reference of C15: the posterior of the 1-7-7-1 network by Hamiltonian Monte Carlo (NUTS), as hmc.json.

Needs numpyro, which the library and run.py do not; see README.md for how it is run. Weights and biases are
N(0, 1 / prior_precision) and targets N(f(x), noise^2), as in run.py. The file holds mean and deviation of the network's
output on the grid, without the noise. Chains find different arrangements of the hidden units, which are the same
function, so R-hat and the effective sample size are those of the predictions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from data import Array, draws, grid
from jax.example_libraries.optimizers import adam
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

jax.config.update("jax_enable_x64", True)
FOLDER = Path(__file__).resolve().parent


def outputs(weights: jax.Array, x: jax.Array, config: dict[str, Any]) -> jax.Array:
    """The network at a flat vector of weights, [N]; per layer the weight matrix [out, in], then the bias."""
    activation = {"ReLU": jax.nn.relu, "Tanh": jnp.tanh}[config["activation"]]
    sizes, start, h = [1, *config["hidden"], 1], 0, x[:, None]
    for number, (a, b) in enumerate(pairwise(sizes)):
        matrix = weights[start : start + a * b].reshape(b, a)
        bias = weights[start + a * b : start + a * b + b]
        start += a * b + b
        h = h @ matrix.T + bias
        h = h if number == len(sizes) - 2 else activation(h)
    return h[:, 0]


def size(config: dict[str, Any]) -> int:
    return sum(a * b + b for a, b in pairwise([1, *config["hidden"], 1]))


def reference(config: dict[str, Any], seed: int) -> dict[str, Any]:
    how = config["hmc"]
    x, y = (jnp.asarray(each) for each in draws(config, seed)["points"])
    at = jnp.asarray(grid(config))

    def energy(weights: jax.Array) -> jax.Array:
        misfit = jnp.sum((y - outputs(weights, x, config)) ** 2) / (2 * config["noise"] ** 2)
        return misfit + config["prior_precision"] / 2 * jnp.sum(weights**2)

    start, key = jax.random.split(jax.random.PRNGKey(seed))
    kernel = NUTS(potential_fn=energy, target_accept_prob=how["target_accept"], max_tree_depth=how["tree_depth"])
    chains = MCMC(
        kernel,
        num_warmup=how["warmup"],
        num_samples=how["samples"] // how["chains"],
        num_chains=how["chains"],
        chain_method="vectorized",
        progress_bar=False,
    )
    begun = time.process_time()
    chains.run(key, init_params=starts(energy, start, config), extra_fields=("diverging", "num_steps"))
    weights = chains.get_samples(group_by_chain=True)  # [chains, n, 78]
    functions = np.asarray(jax.jit(jax.vmap(jax.vmap(lambda w: outputs(w, at, config))))(weights))
    extra = {name: np.asarray(each) for name, each in chains.get_extra_fields(group_by_chain=True).items()}
    r_hat, effective = split_gelman_rubin(functions), effective_sample_size(functions)
    inside = np.abs(np.asarray(at)) <= config["edge"]
    flat = functions.reshape(-1, functions.shape[-1])
    return {
        "mean": digits(flat.mean(0)),
        "deviation": digits(flat.std(0)),
        "diagnostics": {
            "samples": len(flat),
            "chains": how["chains"],
            "r_hat_of_predictions": {"max_at_data": float(r_hat[inside].max()), "max_on_grid": float(r_hat.max())},
            "effective_samples": {"min_at_data": float(effective[inside].min()), "min_on_grid": float(effective.min())},
            # the difference between halves of the chains is an error bar of the reference itself
            "difference_of_halves": difference(functions, inside),
            "divergent": int(extra["diverging"].sum()),
            "leapfrog_steps": float(extra["num_steps"].mean()),
            "seconds": round(time.process_time() - begun, 1),
        },
    }


def starts(energy: Callable[[jax.Array], jax.Array], key: jax.Array, config: dict[str, Any]) -> jax.Array:
    """A start [78] for every chain: the best of several draws from the prior, each after some steps of Adam.

    A chain that starts with most of its ReLUs dead stays where there is next to no posterior mass.
    """
    how = config["hmc"]
    shape = (how["chains"] * how["starts"], size(config))
    begin, update, weights_of = adam(how["start_rate"])

    def descended(weights: jax.Array) -> jax.Array:
        def step(number: int, state: Any) -> Any:
            return update(number, jax.grad(energy)(weights_of(state)), state)

        return weights_of(jax.lax.fori_loop(0, how["start_steps"], step, begin(weights)))

    prior = config["prior_precision"] ** -0.5 * jax.random.normal(key, shape)
    found = jax.jit(jax.vmap(descended))(prior).reshape(how["chains"], how["starts"], -1)
    best = jax.vmap(jax.vmap(energy))(found).argmin(1)
    return found[jnp.arange(how["chains"]), best]


def difference(functions: Array, inside: Any) -> dict[str, float]:
    """Between even and odd chains, at the data: of means in deviations, and of deviations relative to their mean."""
    halves = [functions[which::2].reshape(-1, functions.shape[-1])[:, inside] for which in (0, 1)]
    means, deviations = [each.mean(0) for each in halves], [each.std(0) for each in halves]
    both = sum(deviations) / 2
    return {
        "mean": float(np.abs((means[0] - means[1]) / both).mean()),
        "deviation": float(np.abs((deviations[0] - deviations[1]) / both).mean()),
    }


def digits(values: Array) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of those of config.json")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="other entries of config.json")
    parser.add_argument("--out", type=Path, default=FOLDER / "hmc.json")
    asked = parser.parse_args()
    config = json.loads((FOLDER / "config.json").read_text())
    for name, value in (each.split("=") for each in asked.set):
        config[name] = json.loads(value)
    used = ("points", "edge", "noise", "extent", "grid", "hidden", "activation", "prior_precision", "hmc")
    found = {
        "made_by": "hmc.py",
        "versions": {"numpyro": numpyro.__version__, "jax": jax.__version__, "numpy": np.__version__},
        "config": {name: config[name] for name in used},
        "seeds": {},
    }
    for seed in config["seeds"] if asked.seeds is None else asked.seeds:
        found["seeds"][str(seed)] = reference(config, seed)
        print(seed, json.dumps(found["seeds"][str(seed)]["diagnostics"]), flush=True)
        asked.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
