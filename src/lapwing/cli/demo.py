"""`lapwing demo`: scikit-learn's digits and diabetes, from table to report, in a minute at most on two cores.

The digits are shown to the network upright; turned by a quarter they are what it has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import OptionError
from lapwing.metrics import entropy
from lapwing.reporting.pictures import GREY, LAPLACE, NETWORK, style
from lapwing.reporting.table_report import Tell, report_table, test_rows
from lapwing.tables.bundle import Bundle, Raw
from lapwing.tables.fit import fit_table
from lapwing.tables.reading import open_table, pd


@dataclass(frozen=True, eq=False)
class Shown:
    """One of the demonstrations: what was fitted, and where things are."""

    title: str
    bundle: Bundle
    model: Path
    report: Path
    figures: dict[str, Any]
    said: str

    def as_dict(self) -> dict[str, Any]:
        summary = self.bundle.summary.to_dict()
        return {"title": self.title, "model": str(self.model), "report": str(self.report), "summary": summary}


def run(folder: Path, *, seed: int = 0, progress: Tell | None = None, picture: Path | None = None) -> list[Shown]:
    """Fits both tables, writes models and reports into the folder, and the picture where one is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    tell = progress or (lambda stage, share: None)
    digits, diabetes = tables()
    turned = _turned(digits)
    first = _shown("Handwritten digits", digits, "digit", folder / "digits", seed, tell, turned)
    second = _shown("Progress of diabetes after a year", diabetes, "progression", folder / "diabetes", seed, tell)
    if picture is not None:
        tell("drawing the picture", 0.0)
        draw(picture, first, digits, turned, second, diabetes)
    return [first, second]


def tables() -> tuple[Any, Any]:
    """Digits, 1797 x 64 pixels, and diabetes, 442 x 10 measurements, as data frames with their targets."""
    try:
        from sklearn.datasets import load_diabetes, load_digits
    except ImportError as error:
        raise OptionError(
            "the demonstration needs scikit-learn, which is not installed; expected it. Install it with pip install "
            "'lapwing[tabular]'."
        ) from error
    digits: Any = load_digits()
    pixels = pd.DataFrame(digits.data, columns=[f"pixel {row},{column}" for row in range(8) for column in range(8)])
    diabetes: Any = load_diabetes(scaled=False)
    measured = pd.DataFrame(diabetes.data, columns=list(diabetes.feature_names))
    return pixels.assign(digit=digits.target), measured.assign(progression=diabetes.target)


def _turned(digits: Any) -> Any:
    """The same pictures, turned by a quarter."""
    pixels = digits.drop(columns="digit")
    images = torch.tensor(pixels.to_numpy()).reshape(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    return pd.DataFrame(images.numpy(), columns=pixels.columns)


def _shown(title: str, table: Any, target: str, name: Path, seed: int, tell: Tell, unfamiliar: Any = None) -> Shown:
    def stage(what: str, share: float) -> None:
        tell(f"{title}: {what}", share)

    bundle = fit_table(table, target, seed=seed, progress=stage)
    model, page = name.with_suffix(".lapwing"), name.with_suffix(".html")
    bundle.save(model)
    table.to_csv(name.with_suffix(".csv"), index=False)
    if unfamiliar is not None:
        unfamiliar = unfamiliar.iloc[test_rows(bundle, open_table(table))]  # of no row was anything seen in training
    figures = report_table(bundle, table, page, out_of_distribution=unfamiliar, title=title, progress=stage)
    kind = (
        "held-out digits, turned by a quarter" if unfamiliar is not None else "rows with shuffled and stretched columns"
    )
    inside, outside = figures["unfamiliar"]["flagged"]
    said = f"The flag for unfamiliar rows goes up for {outside:.0%} of {kind}, and for {inside:.1%} of those held out."
    return Shown(title, bundle, model, page, figures, said)


def draw(path: Path, digits: Shown, images: Any, turned: Any, diabetes: Shown, measured: Any) -> None:
    """Three panels: intervals for diabetes; deviations for digits upright and turned; the surest and least sure."""
    held, bundle = digits.figures["looked_at"], digits.bundle
    own, other = (bundle.raw(bundle.encoder(frame.iloc[held])) for frame in (images, turned))
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 3.8), layout="constrained", dpi=120)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 0.95, 1.4))
        _draw_intervals(left, diabetes, measured)
        _draw_flags(middle, digits, own, other)
        pixels = torch.tensor(images.drop(columns="digit").to_numpy()[held])
        _draw_digits(right, pixels, entropy(bundle.probabilities(own)))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def _draw_intervals(axes: Any, shown: Shown, table: Any) -> None:
    rows = table.iloc[shown.figures["looked_at"]]
    predicted = shown.bundle.predict(rows)
    order = predicted["mean"].to_numpy().argsort()
    mean, low, high = (predicted[name].to_numpy()[order] for name in ("mean", "lower_90", "upper_90"))
    truth = rows[shown.bundle.target.name].to_numpy()[order]
    inside = (low <= truth) & (truth <= high)
    place = range(len(mean))
    axes.fill_between(place, low, high, color=LAPLACE, alpha=0.2, linewidth=0, label="90% interval")
    axes.plot(place, mean, color=LAPLACE, label="prediction")
    colours = [GREY if covered else NETWORK for covered in inside]
    axes.scatter(place, truth, s=13, color=colours, zorder=3, label="true value (red: outside)")
    axes.set(xlabel="patients held out, by prediction", ylabel="progression of diabetes", ylim=(-60, 520))
    axes.set_title(f"{inside.mean():.0%} of true values in 90% intervals")
    axes.legend(loc="upper left", ncols=2)


def _draw_flags(axes: Any, shown: Shown, own: Raw, other: Raw) -> None:
    bundle = shown.bundle
    inside, outside = (bundle.familiarity(raw) for raw in (own, other))
    low, high = (float(f(torch.cat([inside, outside])).log10()) for f in (torch.min, torch.max))
    bins = torch.logspace(low, high, 36).tolist()
    for values, colour, label in ((inside, LAPLACE, "digits held out"), (outside, NETWORK, "turned by a quarter")):
        axes.hist(values.tolist(), bins, color=colour, alpha=0.55, label=label)
    axes.axvline(bundle.ood.threshold, color=GREY, linestyle="--", linewidth=1.2, label="flagged beyond this")
    axes.set(xlabel="standard deviation of the logits", ylabel="images", xscale="log")
    axes.xaxis.set_minor_formatter(lambda value, place: "")  # labels within one decade would run into each other
    share = float(bundle.flags(other).double().mean())
    axes.set_title(f"Turned, {share:.0%} of held-out digits are flagged")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
    axes.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="none")


def _draw_digits(axes: Any, pixels: Tensor, uncertainty: Tensor) -> None:
    order = uncertainty.argsort()
    chosen = torch.cat([order[:6], order[-6:]])
    tiles = nn.functional.pad(pixels[chosen].reshape(12, 8, 8), (1, 1, 1, 1))
    strip = tiles.reshape(2, 6, 10, 10).permute(0, 2, 1, 3).reshape(20, 60)
    axes.imshow((strip.max() - strip).numpy(), cmap="gray")
    axes.set_yticks([4.5, 14.5], ["surest", "least\nsure"])
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.set_title("Held-out digits by uncertainty")
    for spine in axes.spines.values():
        spine.set_visible(False)
