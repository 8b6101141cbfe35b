"""A fitted table: how it is encoded, the network, its posterior, and what was calibrated. One file, without pickle.

    bundle = Bundle.load("houses.lapwing")
    bundle.predict("new.csv")        # pandas.DataFrame, one row per row, notes in `.attrs["notes"]`

Amounts have the columns

    mean, sd                          of the predictive distribution: sd^2 = sd_epistemic^2 + sd_noise^2
    sd_epistemic, sd_noise            what more data would settle; what it would not, which may vary from row to row.
                                      Where a value of the row is unknown (see `lapwing.tables.encoder`), the
                                      former holds what it leaves open
    lower_90, upper_90                the Bayesian interval: 90 % probable, if the model is right
    conformal_lower_90, ...upper_90   the split-conformal one: holds for 90 % of new rows from the same source
    ood                               unlike the data: sd_epistemic above `bundle.ood.threshold`, or a value that is
                                      unknown, extremely far from those in training, or of a new level where
                                      training had no rare ones (which are taken together, as new ones are)

Where the noise varies and a row is so far from the data that nothing is known of it, sd may be infinite. Classes have
prediction, p_<class>, entropy (in nats), sd_epistemic (of the logits), prediction_set (conformal), ood.
Tables are read in chunks; memory is that of one chunk, and of the predictions unless they go to a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import log
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lapwing.errors import DataError, LapwingError, StorageError
from lapwing.laplace import BaseLaplace
from lapwing.laplace.calibration import point_noise, point_share
from lapwing.metrics import entropy
from lapwing.predictive import Amounts, probit
from lapwing.serialize.files import read, write
from lapwing.tables import scoring
from lapwing.tables.conformal import Conformal, Unfamiliar
from lapwing.tables.encoder import INPUTS, Encoder, Notes
from lapwing.tables.network import Spec, noise_level
from lapwing.tables.plain_values import typed
from lapwing.tables.reading import Frame, Table, find_column, open_table, pd
from lapwing.tables.restoring import restored
from lapwing.tables.scoring import Row, Summary
from lapwing.tables.targets import CLASSES, Target, present
from lapwing.tables.temperature import Scaled

KIND = "table"
PLAIN, SHIFTED = 1, 2
"""Versions of a file: without and with a shifted mean, which a reader from before would leave out of predictions."""
NUMBERS_OF = {"number": 1, "boolean": 1, "date": 3, "category": 0, "left out": 0}
"""How many numbers a column of each kind gives."""
NUMBERS = 2**24
"""Entries of a Jacobian [batch, outputs, weights] that are in memory at a time."""
SMALLEST = 1e-3
"""Noise of a standardised target below which no level is told from rounding, as in training."""


@dataclass(frozen=True, eq=False)
class Raw:
    """Outputs of the network for n rows, and their variances; amounts are standardised.

    For a row with an unknown value: the mean over what the value may have been, and the variance of that mixture.
    """

    value: Float[Tensor, "n outputs"]
    variance: Float[Tensor, "n outputs"]
    strange: Bool[Tensor, " n"]
    """Rows that are unlike the data by their entries alone, whatever the network says."""
    plain: Float[Tensor, "n outputs"]
    """Softmax of the outputs: probabilities of the network alone, for classes."""
    probable: Float[Tensor, "n outputs"]
    """Probabilities of the posterior, whose mean may be elsewhere than the weights, for classes."""

    @staticmethod
    def joined(parts: Sequence[Raw]) -> Raw:
        """One after the other; at least one."""
        return Raw(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Raw)))


@dataclass(frozen=True, eq=False)
class Bundle:
    """Everything that predicting from a table needs; made by `lapwing.tables.fit.fit_table`."""

    encoder: Encoder
    target: Target
    spec: Spec
    model: nn.Module
    la: BaseLaplace
    conformal: Conformal
    conformal_map: Conformal
    ood: Unfamiliar
    summary: Summary
    notes: tuple[str, ...] = ()
    seed: int = 0
    """Of the split into rows to learn from, to calibrate and to test with."""
    tested: str = ""
    """sha256 of the inputs of the rows to test with, by which a report knows them; empty in files from before."""
    scaled: Scaled | None = None
    """The network alone with a temperature, for classes; None for amounts, and in files from before."""
    shift: Float[Tensor, " params"] | None = None
    """From the trained weights to the mean of the posterior, for classes: see `lapwing.tables.shift`."""

    @property
    def task(self) -> str:
        return self.target.task

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for amounts."""
        return self.target.classes

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the noise of amounts, in their unit; where it varies, the level around which."""
        level = noise_level(self.model)[0] if self.spec.varying else self.la.sigma_noise
        return float(level) * self.target.deviation

    @cached_property
    def noise_map(self) -> float:
        """The same for the network's prediction alone, which must hold for its errors as well: see `point_noise`."""
        if self.spec.varying:
            return self.noise / point_share(self.la) ** 0.5
        return max(point_noise(self.la), SMALLEST) * self.target.deviation

    @property
    def batch(self) -> int:
        """Rows that are predicted at a time."""
        return max(16, min(4096, NUMBERS // (self.la.n_params * self.la.n_outputs)))

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, source: Any, chunk: int | None = None, level: float = 0.9) -> Frame:
        """Predictions for every row of a path or data frame; see the head of this module for the columns."""
        notes = Notes()
        frames = list(self.predict_chunks(source, chunk, level, notes))
        if not frames:
            raise DataError(f"{open_table(source).name} has no rows; expected at least one to predict.")
        out = pd.concat(frames)
        out.attrs["notes"] = notes.listed()
        return out

    def predict_chunks(
        self, source: Any, chunk: int | None = None, level: float = 0.9, notes: Notes | None = None
    ) -> Iterator[Frame]:
        """As `predict`, a frame per chunk of rows; remarks are added to `notes`."""
        notes = Notes() if notes is None else notes
        for frame, x in self.encoded(open_table(source), chunk, notes):
            yield self.frame(self.raw(x), level, frame.index)

    def encoded(
        self, table: Table, chunk: int | None = None, notes: Notes | None = None, *, target: bool = False
    ) -> Iterator[tuple[Frame, Float[Tensor, "rows inputs"]]]:
        """Chunks of a table, and their inputs; with `target` its column is read as well."""
        notes = Notes() if notes is None else notes
        columns = self.encoder.check(table.columns, table.name)
        extra = self.encoder.extra(table.columns, self.target.name)
        if extra:
            listed = ", ".join(repr(name) for name in extra[:5]) + (", ..." if len(extra) > 5 else "")
            notes.say(f"{len(extra)} columns are not known to the model and are ignored: {listed}.")
        text = list(self.encoder.text)
        if target:
            columns = [*columns, find_column(self.target.name, table.columns, table.name)]
            text += [self.target.name] * self.target.as_written
        for frame in table.chunks(columns, text=text, size=chunk):
            yield frame, self.encoder(frame, notes)

    def raw(self, x: Float[Tensor, "rows inputs"]) -> Raw:
        """Outputs of the network and their variances under the posterior, a batch at a time.

        A row with unknown values costs as much as `EXAMPLES` others.
        """
        unknown = x.isnan().any(1)
        said = torch.empty(4, len(x), self.la.n_outputs, dtype=torch.float64)
        if not bool(unknown.all()):
            said[:, ~unknown] = torch.cat([self._said(part) for part in x[~unknown].split(self.batch)], 1)
        if bool(unknown.any()):
            parts = x[unknown].split(max(1, self.batch // len(self.encoder.examples)))
            said[:, unknown] = torch.cat([self._said_of_any(part) for part in parts], 1)
        value, variance, plain, probable = said
        return Raw(value, variance, self.encoder.strange(x), plain, probable)

    @torch.no_grad()
    def _said(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "4 rows outputs"]:
        """Outputs, variances, and as probabilities of the network and of the posterior."""
        linear = self.la.linearise(x)
        value = linear.value.double()
        variance = self.la.posterior.precision.variances(linear).reshape(value.shape).double().clamp_min(0)
        mean = value if self.shift is None else value + linear.mv(self.shift).double()
        return torch.stack([value, variance, value.softmax(1), probit(mean, variance)])

    def _said_of_any(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "4 rows outputs"]:
        """The same on average over what unknown inputs may be; how much that matters adds to the variance."""
        versions = self.encoder.versions(x)
        said = self._said(versions.flatten(0, 1)).unflatten(1, versions.shape[:2])
        mean = said.mean(2)
        mean[1] += said[0].var(1, correction=min(1, versions.shape[1] - 1))  # files from before have one example
        return mean

    def amounts(self, raw: Raw) -> Amounts:
        """Predictions of the posterior, in the unit of the target."""
        if self.spec.varying:
            amounts = Amounts.of_heads(raw.value, raw.variance)
        else:
            amounts = Amounts.of_sigma(raw.value, raw.variance, self.la.sigma_noise)
        return amounts.rescaled(self.target.deviation, self.target.mean)

    def amounts_map(self, raw: Raw) -> Amounts:
        """Predictions of the network alone, with noise that holds for its errors as well: see `point_noise`."""
        alone = self.amounts(raw).alone()
        return replace(alone, log_noise=alone.log_noise + 2 * log(self.noise_map / self.noise))

    def familiarity(self, raw: Raw) -> Float[Tensor, " rows"]:
        """sd_epistemic: of the mean of an amount; of the logits of classes, the root mean square over classes."""
        return self.amounts(raw).epistemic if self.task == "regression" else raw.variance.mean(1).sqrt()

    def probabilities(self, raw: Raw) -> Float[Tensor, "rows classes"]:
        return raw.probable

    def flags(self, raw: Raw) -> Bool[Tensor, " rows"]:
        """Rows that are unlike the data."""
        return (self.familiarity(raw) > self.ood.threshold) | raw.strange

    def frame(self, raw: Raw, level: float = 0.9, index: Any = None) -> Frame:
        """Predictions as a table."""
        known = self.familiarity(raw)
        percent = f"{100 * level:g}"
        if self.task == "regression":
            amounts = self.amounts(raw)
            half = amounts.half(level)
            lower, upper = self.conformal.interval(amounts.mean, amounts.deviation, level)
            columns: dict[str, Any] = {
                "mean": amounts.mean,
                "sd": amounts.deviation,
                "sd_epistemic": known,
                "sd_noise": amounts.noise,
                f"lower_{percent}": amounts.mean - half,
                f"upper_{percent}": amounts.mean + half,
                f"conformal_lower_{percent}": lower,
                f"conformal_upper_{percent}": upper,
            }
            columns = {name: column.numpy() for name, column in columns.items()}
        else:
            p = self.probabilities(raw)
            names = np.array(self.classes, dtype=object)
            sets = self.conformal.sets(p, level).numpy()
            columns = {
                "prediction": names[p.argmax(1).numpy()],
                **{f"p_{name}": p[:, number].numpy() for number, name in enumerate(self.classes)},
                "entropy": entropy(p).numpy(),
                "sd_epistemic": known.numpy(),
                "prediction_set": [" | ".join(names[inside]) for inside in sets],
            }
        return pd.DataFrame({**columns, "ood": self.flags(raw).numpy()}, index=index)

    # -- scores ------------------------------------------------------------------------------------------------------

    def evaluate(self, source: Any, chunk: int | None = None) -> Summary:
        """MAP against Laplace on any table that has the target; rows without a target are passed over."""
        xs, ys = [], []
        for frame, x in self.encoded(open_table(source), chunk, target=True):
            y = self.target.encode(frame[self.target.name])
            kept = torch.from_numpy(present(y))
            xs.append(x[kept])
            ys.append(torch.from_numpy(y)[kept])
        if not sum(map(len, ys)):
            raise DataError(
                f"no row has a known value of {self.target.name!r}; expected some to score predictions with."
            )
        x, y = torch.cat(xs), torch.cat(ys)
        return Summary(self.task, score(self, x, y), {"test": len(y)}, {})

    def explain(self, level: float = 0.9) -> list[str]:
        """What the task, the intervals and the flag mean, in words."""
        classes = self.task == "classification"
        return [self.target.reason, self.conformal.explain(level, classes), self.ood.explain(classes)]

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """One safetensors file; atomic."""
        state = self.la.state_dict()
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"laplace.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        tensors |= {"conformal": self.conformal.scores, "conformal_map": self.conformal_map.scores}
        if self.scaled is not None:
            tensors["conformal_scaled"] = self.scaled.conformal.scores
        if self.shift is not None:
            tensors["shift"] = self.shift
        write(
            path,
            tensors,
            {
                "kind": KIND,
                "kind_version": PLAIN if self.shift is None else SHIFTED,
                "encoder": self.encoder.to_dict(),
                "target": self.target.to_dict(),
                "spec": asdict(self.spec),
                "laplace": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
                "ood": asdict(self.ood),
                "summary": self.summary.to_dict(),
                "notes": list(self.notes),
                "seed": self.seed,
                "tested": self.tested,
                "temperature_map": None if self.scaled is None else self.scaled.temperature,
            },
        )

    @staticmethod
    def load(path: str | Path) -> Bundle:
        """The bundle of a file; a damaged file, or one of something else, is refused with what is wrong."""
        tensors, stored = read(path)
        if stored.get("kind") != KIND:
            raise StorageError(
                f"{path} holds {stored.get('kind', 'something else')!r}; expected a model that was fitted to a table "
                "with `lapwing fit`. A posterior of a network of your own is read with lapwing.load(path, model)."
            )
        if stored.get("kind_version") not in (PLAIN, SHIFTED):
            raise StorageError(
                f"{path} has version {stored.get('kind_version')} of a fitted table; expected {PLAIN} or {SHIFTED}. "
                "Use the lapwing that wrote it, or fit again."
            )
        try:
            return _restored(tensors, stored)
        except Exception as error:  # whatever somebody may have put into a file
            what = str(error) if isinstance(error, LapwingError) else f"{type(error).__name__}: {error}."
            raise StorageError(f"{path} does not hold what a fitted table needs: {what} Fit again.") from error


def _restored(tensors: Mapping[str, Tensor], stored: Mapping[str, Any]) -> Bundle:
    spec, target = typed(Spec, stored["spec"]), Target.from_dict(stored["target"])
    encoder = Encoder.from_dict(stored["encoder"])
    ood, summary = typed(Unfamiliar, stored["ood"]), Summary.from_dict(stored["summary"])
    notes, seed = stored["notes"], stored["seed"]
    _check_sizes(encoder, target, spec)
    if type(seed) is not int or seed < 0:
        raise StorageError(f"the seed is {seed!r:.40}; expected a whole number >= 0.")
    scaled, level = None, stored.get("temperature_map")
    if level is not None:
        scaled = Scaled(float(level), Conformal(tensors["conformal_scaled"]))
    methods = 2 if scaled is None else 3
    if ood.rows < 1 or len(summary.rows) != methods or not all(isinstance(note, str) for note in notes):
        raise StorageError(
            f"the flag is of {ood.rows} rows, the scores are of {len(summary.rows)} methods, or a note is not text; "
            f"expected at least one row, {methods} methods, and text."
        )
    state = {**stored["laplace"], **_under("laplace.", tensors)}
    model, laplace = restored(spec, target.task, _under("model.", tensors), state)
    shift = None
    if stored["kind_version"] == SHIFTED:
        shift = tensors["shift"]
        _check_shift(shift, laplace, target.task)
    return Bundle(
        encoder=encoder,
        target=target,
        spec=spec,
        model=model,
        la=laplace,
        conformal=Conformal(tensors["conformal"]),
        conformal_map=Conformal(tensors["conformal_map"]),
        ood=ood,
        summary=summary,
        notes=tuple(notes),
        seed=seed,
        tested=str(stored.get("tested", "")),
        scaled=scaled,
        shift=shift,
    )


def _check_shift(shift: Tensor, laplace: BaseLaplace, task: str) -> None:
    size, dtype = laplace.space.size, laplace.space.dtype
    if task != "classification" or tuple(shift.shape) != (size,) or shift.dtype != dtype:
        raise StorageError(
            f"the mean of a {task} is shifted by a tensor {tuple(shift.shape)} of {shift.dtype}; expected one of "
            f"({size},) of {dtype}, and classes."
        )
    if not bool(shift.isfinite().all()):
        raise StorageError("the shift of the mean holds NaN or infinite values; expected finite ones.")


def _check_sizes(encoder: Encoder, target: Target, spec: Spec) -> None:
    """Columns, classes and network fit each other, and are no larger than a fit makes them: levels take memory."""
    if target.words and len(target.words) != len(target.classes):
        raise StorageError(f"{len(target.words)} words stand for {len(target.classes)} classes; expected one for each.")
    if target.task not in ("regression", "classification"):
        raise StorageError(f"the task is {target.task!r}; expected 'regression' or 'classification'.")
    for column in encoder.columns:
        if column.kind not in NUMBERS_OF or not len(column.means) == len(column.deviations) == NUMBERS_OF[column.kind]:
            raise StorageError(
                f"the column {column.name!r} is a {column.kind!r} of {len(column.means)} means and "
                f"{len(column.deviations)} deviations; expected as many of both as one of {NUMBERS_OF} has."
            )
    levels = sum(len(column.levels) + len(column.deviations) + 2 for column in encoder.used)
    inputs = len(encoder.inputs) if levels <= 4 * INPUTS else levels
    if inputs != spec.inputs or inputs > 2 * INPUTS or target.outputs != spec.outputs or target.outputs > CLASSES:
        raise StorageError(
            f"there are {inputs} inputs and {target.outputs} outputs for a network with {spec.inputs} and "
            f"{spec.outputs}; expected the same, at most {2 * INPUTS} and {CLASSES}."
        )
    if not encoder.examples or any(len(row) != inputs for row in encoder.examples):
        raise StorageError(f"the examples are not rows of {inputs} inputs; expected one or more of them.")


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def score(bundle: Bundle, x: Float[Tensor, "rows inputs"], y: Tensor) -> tuple[Row, ...]:
    """MAP and Laplace, which is last, on rows with targets: amounts in their unit, or class numbers.

    Between them MAP with a temperature, for classes.
    """
    start = perf_counter()
    with torch.no_grad():
        for part in x.split(4096):
            bundle.model(part)  # for its time: what it says is in `raw` as well
    middle = perf_counter()
    raw = bundle.raw(x)
    taken = middle - start, perf_counter() - middle
    if bundle.task == "regression":
        return (
            scoring.score_amounts("MAP", bundle.amounts_map(raw), y, bundle.conformal_map, taken[0]),
            scoring.score_amounts("Laplace", bundle.amounts(raw), y, bundle.conformal, taken[1]),
        )
    methods = [("MAP", raw.plain, bundle.conformal_map, taken[0])]
    if bundle.scaled is not None:
        methods.append(("MAP, scaled", bundle.scaled.probabilities(raw.value), bundle.scaled.conformal, taken[0]))
    methods.append(("Laplace", bundle.probabilities(raw), bundle.conformal, taken[1]))
    return tuple(scoring.score_classes(name, p, y, conformal, seconds) for name, p, conformal, seconds in methods)
