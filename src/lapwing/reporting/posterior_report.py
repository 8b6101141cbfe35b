"""report(la, loader, path): the page for any posterior. Cost: one pass over the loader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lapwing.errors import OptionError
from lapwing.laplace import BaseLaplace
from lapwing.reporting.figures import collect
from lapwing.reporting.observations import observe
from lapwing.reporting.page import check_early, write
from lapwing.reporting.words import Figures


def report(
    la: Any,
    loader: Any,
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    out_of_distribution: Any = None,
    title: str | None = None,
) -> Figures:
    """Writes one self-contained HTML page about a fitted posterior, and returns its figures.

    `loader` yields (x, y) that were not used for training. `names` are those of the input columns, `classes` those of
    the classes. `out_of_distribution` is a tensor of inputs, or batches of them; without it unfamiliar inputs are made
    by shuffling and stretching the columns, and the page says so. The model is not changed.

    For a fitted table (`Bundle`), `loader` is a table with the target: the path of a file, or a data frame.
    """
    if not isinstance(la, BaseLaplace):
        return _of_table(la, loader, path, out_of_distribution, title)
    check_early(path)
    observed = observe(la, loader, out_of_distribution, keep_columns=names is not None)
    unknown = (
        "Whether the rows were used for training is not known here; of rows that were, the figures would be too good."
    )
    figures = collect(la, observed, names=names, classes=classes, title=title, choices=[unknown])
    write(path, figures)
    return figures


def _of_table(bundle: Any, source: Any, path: str | os.PathLike[str], outside: Any, title: str | None) -> Figures:
    from lapwing.reporting.table_report import report_table
    from lapwing.tables.bundle import Bundle  # pandas is an extra of the package

    if not isinstance(bundle, Bundle):
        raise OptionError(
            f"a report of a {type(bundle).__name__} was asked for; expected a Laplace object, or a fitted table."
        )
    return report_table(bundle, source, path, out_of_distribution=outside, title=title)
