"""`lapwing`: error bars for a table in one command.

lapwing fit data.csv --target price           a network with a posterior, in data.lapwing
lapwing predict data.lapwing new.csv          predictions with error bars, in predictions.csv
lapwing report data.lapwing data.csv          one page of pictures and plain language, in report.html
lapwing inspect data.lapwing                  what a file holds
lapwing demo                                  all of it on two real data sets
"""

from __future__ import annotations

import errno
import io
import os
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Annotated

import typer
from rich.text import Text

import lapwing
from lapwing.cli.console import SMALL, Stages, comparison, handled, notes, one_thread, say, say_json
from lapwing.errors import OptionError
from lapwing.serialize.files import check_writable

app = typer.Typer(
    name="lapwing",
    help="Error bars for a table: fit a network with a Laplace posterior, predict, and report.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[Path, typer.Argument(help="A file that `lapwing fit` has written.", show_default=False)]
Data = Annotated[Path, typer.Argument(help="A CSV or Parquet file.", show_default=False)]


class TaskKind(StrEnum):
    AUTO = "auto"
    REGRESSION = "regression"
    CLASSIFICATION = "classification"


class Noise(StrEnum):
    AUTO = "auto"
    CONSTANT = "constant"
    VARYING = "varying"


class NetworkKind(StrEnum):
    MLP = "mlp"
    RESNET = "resnet"


def _version(asked: bool) -> bool:
    if asked:
        say(f"lapwing {lapwing.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def fit(
    data: Data,
    targets: Annotated[list[str], typer.Option("--target", help="The column to predict.", show_default=False)],
    task: Annotated[TaskKind, typer.Option(help="Amounts, classes, or what the column looks like.")] = TaskKind.AUTO,
    out: Annotated[Path | None, typer.Option(help="Where to write the model; <data>.lapwing by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the split and the training; the same seed, the same result.")] = 0,
    network: Annotated[NetworkKind | None, typer.Option(help="Plain layers, or residual blocks.")] = None,
    width: Annotated[int | None, typer.Option(help="Units of a layer.", min=1)] = None,
    depth: Annotated[int | None, typer.Option(help="Number of layers, or blocks.", min=0)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; by its size if not given.", min=1)] = None,
    noise: Annotated[
        Noise, typer.Option(help="Of amounts: one level, one that varies with the inputs, or (auto) the more probable.")
    ] = Noise.AUTO,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit a network with error bars to a table, and compare it with the network alone."""
    with handled(debug, as_json):
        from lapwing.tables.fit import fit_table
        from lapwing.tables.training import Spec

        target = _only(targets)
        given = {"kind": network and network.value, "width": width, "depth": depth}
        chosen = {name: value for name, value in given.items() if value is not None}
        spec = Spec(1, 1, **chosen) if chosen else None  # inputs and outputs are those of the table
        path = out or Path(data.name.removesuffix(".gz") or "table").with_suffix(".lapwing")
        _check_writable(path, data)
        start = perf_counter()
        small = data.is_file() and data.stat().st_size <= SMALL
        with Stages(as_json) as stages, one_thread(small):
            options = {"epochs": epochs, "spec": spec, "noise": noise.value}
            bundle = fit_table(data, target, task=task.value, seed=seed, progress=stages, **options)
            bundle.save(path)
        seconds = perf_counter() - start
        fitted = {
            "model": str(path),
            "target": target,
            "task": bundle.task,
            "structure": bundle.la.structure,
            "parameters": bundle.la.n_params,
            "summary": bundle.summary.to_dict(),
            "notes": list(bundle.notes),
            "explained": bundle.explain(),
            "seed": seed,
            "seconds": seconds,
        }
        if as_json:
            say_json(fitted)
            return
        used = bundle.summary.rows_used
        say(
            f"{bundle.task.capitalize()} of {target!r}: {used['train']:,} rows to learn from, {used['calibration']:,} "
            f"to calibrate, {used['test']:,} to test.",
            f"{bundle.la.n_params:,} weights, {bundle.la.structure} posterior, {seconds:.1f} s.\n",
            comparison(bundle.summary),
            *notes(bundle.notes),
            f"\nModel: {path}",
            f"Next:  lapwing report {quote(str(path))} {quote(str(data))}",
        )


@app.command()
def predict(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Where to write the predictions: .csv, .csv.gz, .tsv, or .parquet.")] = Path(
        "predictions.csv"
    ),
    level: Annotated[float, typer.Option(help="Probability of the intervals and sets.", min=0.01, max=0.999)] = 0.9,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write labels that begin as formulas do (=, +, -, @) without a ' before them.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict the rows of a table, with error bars, intervals and a flag for rows unlike the data."""
    with handled(debug, as_json):
        from lapwing.tables.bundle import Bundle
        from lapwing.tables.writing import write_predictions

        _check_writable(out, model, data)
        _check_format(out)
        bundle = Bundle.load(model)
        start = perf_counter()
        with Stages(as_json) as stages:

            def told(rows: int) -> None:
                stages(f"predicting, {rows:,} rows", 0.0)

            written = asdict(write_predictions(bundle, data, out, level=level, progress=told, raw=raw))
        explained = bundle.explain(level)[1:]
        if as_json:
            say_json(
                {
                    "predictions": str(out),
                    **written,
                    "level": level,
                    "threshold": bundle.ood.threshold,
                    "explained": explained,
                    "seconds": perf_counter() - start,
                }
            )
            return
        flagged = f"{written['flagged']:,} flagged as unlike the data" if written["flagged"] else "none unlike the data"
        say(
            f"{written['rows']:,} rows predicted, {flagged}, {perf_counter() - start:.1f} s.",
            *notes(written["notes"]),
            *notes(explained, "What the columns promise"),
            f"\nPredictions: {out}",
        )


@app.command()
def report(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
    unfamiliar: Annotated[
        Path | None, typer.Option(help="A table of rows unlike the data, to compare uncertainties with.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one page of pictures and plain language about a model; it opens offline in any browser."""
    with handled(debug, as_json):
        from lapwing.reporting.table_report import report_table
        from lapwing.tables.bundle import Bundle

        _check_writable(out, model, data, *([unfamiliar] if unfamiliar else []))
        bundle = Bundle.load(model)
        start = perf_counter()
        with Stages(as_json) as stages:
            figures = report_table(bundle, data, out, out_of_distribution=unfamiliar, title=title, progress=stages)
        if as_json:
            say_json({"report": str(out), "seconds": perf_counter() - start, "figures": figures})
            return
        from lapwing.reporting.words import headline

        known, other = "the rows that the fit held out to test", "rows that may have been used for training"
        which = known if figures["rows_are_test"] else other
        say(
            f"{figures['rows']:,} rows ({which}), {perf_counter() - start:.1f} s.",
            *headline(figures),
            f"\nReport: {out}",
        )


@app.command()
def inspect(model: Model, as_json: Json = False, debug: Debug = False) -> None:
    """Say what a file holds: task, columns, network, posterior, calibration, scores."""
    with handled(debug, as_json):
        from lapwing.cli.inspecting import inspected, lines

        facts = inspected(model)
        if as_json:
            say_json(facts)
        else:
            say(*lines(facts))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("lapwing-demo"),
    picture: Annotated[Path | None, typer.Option(help="Where to draw a picture of it, as PNG.")] = None,
    seed: Annotated[int, typer.Option(help="Of the split and the training.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit, predict and report on real data: handwritten digits, and the progress of diabetes. About a minute."""
    with handled(debug, as_json):
        from lapwing.cli.demo import run
        from lapwing.tables.fit import check_seed

        check_seed(seed)
        if out.exists() and not out.is_dir():
            raise OptionError(f"{out} is a file; expected the name of a folder to write to.")
        if picture is not None and picture.is_dir():
            raise OptionError(f"{picture} is a folder; expected the name of a file to write.")
        start = perf_counter()
        with Stages(as_json) as stages, one_thread():
            shown = run(out, seed=seed, progress=stages, picture=picture)
        if as_json:
            say_json(
                {
                    "demos": [demonstration.as_dict() for demonstration in shown],
                    "seconds": perf_counter() - start,
                    "picture": None if picture is None else str(picture),
                }
            )
            return
        for demonstration in shown:
            say(
                Text(demonstration.title, style="bold cyan"),
                comparison(demonstration.bundle.summary),
                demonstration.said,
                f"Model:  {demonstration.model}",
                f"Report: {demonstration.report}\n",
            )
        say(
            *([f"Picture: {picture}"] if picture else []),
            f"Done in {perf_counter() - start:.0f} s. Open the reports in a browser.",
        )


def _only(targets: list[str]) -> str:
    if len(targets) != 1:
        listed = ", ".join(map(repr, targets))
        raise OptionError(f"--target was given {len(targets)} times ({listed}); expected one. Fit a model for each.")
    return targets[0]


def _check_writable(path: Path, *inputs: Path) -> None:
    """Before the work, not after it; nothing that is read is written over."""
    if str(path) == "-":
        raise OptionError("'-' is no name of a file; expected one to write, such as results.csv.")
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            check_writable(path)  # says so
    if path.is_dir():
        raise OptionError(f"{path} is a folder; expected the name of a file to write.")
    if path.exists() and not path.is_file():
        raise OptionError(f"{path} is a device or a pipe; expected the name of a file to write.")
    if path.exists() and any(other.exists() and path.samefile(other) for other in inputs):
        raise OptionError(f"{path} is read and would be written over; expected another name. Give one with --out.")
    if not path.parent.is_dir():
        raise OptionError(f"there is no folder {path.parent}; expected one that exists. Create it first.")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(
            f"the folder {path.parent} is write-protected; expected one to write to. Choose another --out."
        )
    check_writable(path)


def _check_format(path: Path) -> None:
    """A table of predictions is CSV or Parquet, and no name should claim another format."""
    if path.suffix.lower() in (".xlsx", ".xls", ".ods", ".json", ".html", ".zip", ".feather", ".lapwing"):
        raise OptionError(
            f"predictions cannot be written as {path.suffix}; expected .csv, .csv.gz, .tsv, .parquet. Excel opens CSV."
        )


def main() -> None:
    """The command `lapwing`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal has every letter of a name
            stream.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    main()
