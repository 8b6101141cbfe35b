"""MAP against Laplace on five UCI tables, by the code that `lapwing fit` runs: what error bars of the mean are worth.

    LAPWING_DATA=... python benchmarks/uci.py [--sets boston,energy] [--splits 0,1,2] [--jobs 2]     25 minutes

Each of the standard 90/10 splits is fitted with `fit_table` as a table with the target "y", the rows to learn from
only; it keeps 30 % of them to itself for conformal intervals and its own summary. Scores are of the 10 %, which nothing
has seen. Both columns have the same network, whose noise is constant or varies with the inputs, and each has the level
of noise that suits it, from the training rows alone: MAP by generalised cross-validation, which is the evidence's noise
plus what the weights leave open on average (`lapwing.laplace.calibration.point_noise`), Laplace by the evidence.
`gain` is MAP NLL - Laplace NLL with the standard error of the paired difference over test rows; of a set, the mean gain
with its standard error over splits, how many splits gain, and how many lose more than two standard errors. Writes
results/uci.json when all sets and splits are run; `map_shared` there is MAP with the noise of Laplace.

The design of `lapwing fit` was chosen by looking at splits 3 to 9, so those say little about new data: `untouched` has
the figures of the other 13 splits of each set, 65 in all.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from _common import context, write

from lapwing.tables.fit import fit_table
from lapwing.tables.reading import open_table

SETS = "boston", "concrete", "energy", "wine", "naval"
SPLITS = tuple(range(20))
DESIGN = tuple(range(3, 10))
"""Splits that the design was chosen on."""
SEED = 0


def run(folder: Path, name: str, number: int) -> dict[str, Any]:
    stored = np.load(folder / "uci" / f"{name}.npz")
    x = stored["X"]
    table = pd.DataFrame(x, columns=[f"x{at}" for at in range(x.shape[1])]).assign(y=stored["y"])
    learn, test = (table.iloc[stored[key][number].astype(int)] for key in ("std_train_idx", "std_test_idx"))
    start = time.perf_counter()
    bundle = fit_table(learn, "y", task="regression", seed=SEED)
    seconds = time.perf_counter() - start
    plain, laplace = bundle.evaluate(test).rows
    found = bundle.predict(test)
    x, y = torch.cat([x for _, x in bundle.encoded(open_table(test))]), torch.tensor(test["y"].to_numpy())
    raw = bundle.raw(x)
    alone = bundle.amounts_map(raw)
    shared = -float(bundle.amounts(raw).alone().log_prob(y).mean())
    difference = (bundle.amounts(raw).log_prob(y) - alone.log_prob(y)).numpy()
    far = test.drop(columns="y") + 10 * learn.drop(columns="y").std()
    return {
        "set": name,
        "split": number,
        "rows": {"learn": len(learn), "test": len(test)},
        "noise": "varying" if bundle.spec.varying else "constant",
        "map": asdict(plain),
        "map_shared": shared,
        "laplace": asdict(laplace),
        "gain": float(difference.mean()),
        "standard_error": float(difference.std(ddof=1) / len(difference) ** 0.5),
        "flagged": {"test": float(found["ood"].mean()), "far": float(bundle.predict(far)["ood"].mean())},
        "seconds": seconds,
    }


def line(row: dict[str, Any]) -> str:
    plain, laplace = row["map"], row["laplace"]
    return (
        f"{row['set']:9} {row['split']:5} {row['noise']:8} {plain['nll']:9.3f} "
        f"{laplace['nll']:9.3f} {row['gain']:+8.3f} +- {row['standard_error']:.3f} {laplace['coverage_90']:9.2f} "
        f"{laplace['conformal_90']:9.2f} {row['flagged']['far']:5.2f} {row['seconds']:8.1f}"
    )


def totals(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A set over its splits."""
    gains = np.array([row["gain"] for row in rows])
    return {
        "set": name,
        "splits": len(rows),
        "map": float(np.mean([row["map"]["nll"] for row in rows])),
        "laplace": float(np.mean([row["laplace"]["nll"] for row in rows])),
        "gain": float(gains.mean()),
        "standard_error": float(gains.std(ddof=1) / len(gains) ** 0.5) if len(gains) > 1 else float("nan"),
        "better": int((gains > 0).sum()),
        "better_than_shared": sum(row["laplace"]["nll"] < row["map_shared"] for row in rows),
        "varying": sum(row["noise"] == "varying" for row in rows),
        "clearly_worse": sum(row["gain"] < -2 * row["standard_error"] for row in rows),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All sets together: every split, those the design was chosen on, and those it has not seen."""

    def part(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "splits": len(chosen),
            "better": sum(row["gain"] > 0 for row in chosen),
            "largest_loss_in_standard_errors": max(-row["gain"] / row["standard_error"] for row in chosen),
        }

    return {
        "all": part(rows),
        "design_splits": list(DESIGN),
        "design": part([row for row in rows if row["split"] in DESIGN]),
        "untouched": part([row for row in rows if row["split"] not in DESIGN]),
        "sets_with_mean_gain": {
            "all": _gaining(rows),
            "untouched": _gaining([row for row in rows if row["split"] not in DESIGN]),
        },
    }


def _gaining(rows: list[dict[str, Any]]) -> int:
    names = {row["set"] for row in rows}
    return sum(float(np.mean([row["gain"] for row in rows if row["set"] == name])) > 0 for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description="MAP against Laplace on UCI tables, by the code of `lapwing fit`")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--splits", default=",".join(map(str, SPLITS)))
    options = parser.parse_args()
    if "LAPWING_DATA" not in os.environ:
        parser.exit(2, "uci.py needs the folder of the data sets: set LAPWING_DATA.\n")
    folder, where = Path(os.environ["LAPWING_DATA"]), context("uci")
    torch.set_num_threads(1)
    print("set       split noise      MAP NLL   Laplace     gain +- error  cover 90  conf. 90   far  seconds")
    wanted = [(name, int(number)) for name in options.sets.split(",") for number in options.splits.split(",")]
    rows = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for found in pool.map(run, *zip(*((folder, *each) for each in wanted), strict=True)):
            rows.append(found)
            print(line(found), flush=True)
    sets = [totals(name, [row for row in rows if row["set"] == name]) for name in options.sets.split(",")]
    for found in sets:
        print(
            f"{found['set']:9} mean           {found['map']:9.3f} {found['laplace']:9.3f} "
            f"{found['gain']:+8.3f} +- {found['standard_error']:.3f}   "
            f"better on {found['better']} of {found['splits']} ({found['better_than_shared']} if the noise is shared), "
            f"worse by more than two standard errors on {found['clearly_worse']}"
        )
    if {(row["set"], row["split"]) for row in rows} == {(name, split) for name in SETS for split in SPLITS}:
        write(where, {"summary": summary(rows), "sets": sets, "rows": rows})


if __name__ == "__main__":
    main()
