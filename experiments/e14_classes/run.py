"""E14: class probabilities of `lapwing fit` on four small tables, twenty splits each, beside MAP and other classifiers.

Every split is that of `fit_table` with its seed: rows to learn from, to calibrate with, and to test on. On the test
rows: the network alone (MAP), the same with a temperature from the calibration rows, its Laplace posterior, a network
alone that was trained in the same way without keeping rows apart (the posterior learns from them, MAP does not), and,
from the rows to learn from and to calibrate with together, scikit-learn's logistic regression (strength by five-fold
cross-validation) and a random forest.
"""

from __future__ import annotations

import sys
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures

from lapwing.metrics import calibration_error, nll
from lapwing.reporting.table_report import test_rows
from lapwing.tables.bundle import Bundle
from lapwing.tables.fit import fit_table
from lapwing.tables.reading import open_table
from lapwing.tables.targets import TRAIN, split
from lapwing.tables.training import train

METHODS = {
    "MAP": "network alone (MAP)",
    "MAP, scaled": "MAP with a temperature",
    "MAP, all rows": "MAP, trained with no rows kept apart",
    "Laplace": "Laplace",
    "logistic": "logistic regression, cross-validated",
    "forest": "random forest",
}
SMALLEST = 1e-6
"""Below which no probability is scored: a forest gives zeros."""


def frame_of(name: str) -> pd.DataFrame:
    data = getattr(datasets, f"load_{name}")()
    frame = pd.DataFrame(data.data, columns=[f"x{number}" for number in range(data.data.shape[1])])
    return frame.assign(kind=[f"class {number}" for number in data.target])


def others(frame: pd.DataFrame, test: np.ndarray, trees: int, seed: int) -> dict[str, dict[str, float]]:
    """scikit-learn's classifiers on the same test rows, from all the other rows."""
    x, y = frame.drop(columns="kind").to_numpy(), frame["kind"].str.removeprefix("class ").astype(int).to_numpy()
    learn = np.setdiff1d(np.arange(len(x)), test)
    linear = LogisticRegressionCV(
        Cs=10,
        cv=5,
        scoring="neg_log_loss",
        max_iter=2000,
        random_state=seed,
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
    )
    models = {
        "logistic": make_pipeline(StandardScaler(), linear),
        "forest": RandomForestClassifier(trees, random_state=seed, n_jobs=1),
    }
    found = {}
    for name, model in models.items():
        p = torch.from_numpy(model.fit(x[learn], y[learn]).predict_proba(x[test])).clamp_min(SMALLEST)
        truth = torch.from_numpy(y[test])
        found[name] = {"nll": nll(p / p.sum(1, keepdim=True), truth), "ece": calibration_error(p, truth)}
    return found


def with_all_rows(bundle: Bundle, frame: pd.DataFrame, test: np.ndarray, epochs: int | None) -> dict[str, float]:
    """The network alone, trained as `fit_table` does, on all of its rows to learn from."""
    y = bundle.target.encode(frame["kind"])
    learn = np.flatnonzero(split(y, bundle.target, bundle.seed) == TRAIN)
    x, truth = bundle.encoder(frame), torch.from_numpy(y).long()
    found = train(x[learn], truth[learn], bundle.task, bundle.spec, seed=bundle.seed, epochs=epochs, apart=False)
    with torch.no_grad():
        p = found.model(x[test]).softmax(1)
    return {"nll": nll(p, truth[test]), "ece": calibration_error(p, truth[test])}


def study(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    figures: dict[str, Any] = {}
    for name in config["sets"]:
        frame = frame_of(name)
        bundle = fit_table(frame, "kind", seed=config["seed"], epochs=config["epochs"])
        test = test_rows(bundle, open_table(frame))
        assert test is not None
        scores = {row.method: {"nll": row.nll, "ece": row.ece} for row in bundle.summary.rows}
        scores["MAP, all rows"] = with_all_rows(bundle, frame, test, config["epochs"])
        assert bundle.scaled is not None
        figures[name] = {
            "rows": bundle.summary.rows_used,
            "weights": bundle.la.n_params,
            "structure": bundle.la.structure,
            "temperature_of_map": bundle.scaled.temperature,
            "temperature_of_posterior": float(bundle.la.temperature),
            "mean": bundle.la.choices[0],
            "scores": scores | others(frame, test, config["trees"], config["seed"]),
        }
    return figures, {}


def compared(by_seed: dict[str, Any], name: str) -> dict[str, Any]:
    """Means over splits, and the gain of Laplace over the others with its standard error."""
    out: dict[str, Any] = {}
    for measure in ("nll", "ece"):
        scores = {method: [each[name]["scores"][method][measure] for each in by_seed.values()] for method in METHODS}
        gains = {
            m: [a - b for a, b in zip(scores[m], scores["Laplace"], strict=True)] for m in METHODS if m != "Laplace"
        }
        out[measure] = {method: fmean(values) for method, values in scores.items()}
        out[f"{measure}_gain_over"] = {
            m: {"mean": fmean(g), "error": stdev(g) / sqrt(len(g))} for m, g in gains.items()
        }
        out[f"{measure}_better_than_map_on"] = sum(gain > 0 for gain in gains["MAP"])
    return out


def draw(experiment: Experiment, means: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, len(means), figsize=(3.4 * len(means), 3.2), squeeze=False)
    colours = [COLOURS[name] for name in ("map", "data", "sampled", "laplace", "exact", "other")]
    short = ["MAP", "MAP, scaled", "MAP, all rows", "Laplace", "logistic", "forest"]
    for axis, (name, found) in zip(axes[0], means.items(), strict=True):
        values = [found["nll"][method] for method in METHODS]
        axis.bar(range(len(METHODS)), values, color=colours)
        for number, value in enumerate(values):
            axis.text(number, value, f"{value:.3f}", ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(METHODS)), short, fontsize=8, rotation=35)
        axis.set_title(name.replace("_", " "))
        axis.margins(y=0.12)
    axes[0, 0].set_ylabel("mean NLL of test rows")
    experiment.save(figure)


def main(experiment: Experiment) -> None:
    ours, _ = experiment.over_seeds(study)
    means = {name: compared(ours["by_seed"], name) for name in experiment.config["sets"]}
    held = {
        f"{name}: the mean NLL of Laplace is no worse than MAP's": found["nll_gain_over"]["MAP"]["mean"] >= 0
        for name, found in means.items()
    }
    better = sum(found["nll_gain_over"]["MAP"]["mean"] > 0 for found in means.values())
    held["the mean NLL of Laplace is better than MAP's on at least three of the four"] = better >= 3
    scaled = sum(found["nll_gain_over"]["MAP, scaled"]["mean"] > 0 for found in means.values())
    held["the mean NLL of Laplace is better than that of MAP with a temperature on at least three"] = scaled >= 3
    draw(experiment, means)
    experiment.write({"means": means, **ours}, {"bar": "set by the project: no source has these figures"}, held)


if __name__ == "__main__":
    main(Experiment.of(__file__))
