"""Draws mistakes at random places of the library, for a measure of the tests that no author has a hand in.

    PYTHONPATH=tests python -m mutation.draw --seed 1 --count 50          # lists them
    PYTHONPATH=tests python -m mutation.draw --seed 1 --count 50 --run --jobs 2

A place is an operator, a comparison, a whole number, a truth value, a condition or a statement; each is as likely as
any other. Text of messages, annotations, decorators and what only pictures and the command line use are left out.
Mistakes that change no result (speed, memory, wording) are taken out by number in `TAKEN_OUT`, by whoever reads the
list before it is run; the next of the order take their place.
A mistake meets the tests that execute its block, by the map that `mutation.seen` makes, the quick and specific first;
one that no test executes survives.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mutation.mutants import Mutant
from mutation.run import ROOT, Outcome, outcome
from mutation.seen import in_order, those_that_execute

SOURCE = ROOT / "src" / "lapwing"
LEFT_OUT = ("reporting", "cli", "__init__.py", "errors.py", "tape/plain.py")
TAKEN_OUT: dict[int, dict[int, str]] = {
    3: {
        8: "how many samples of a batch of three are looked at again: one is enough",
        25: "backward passes one by one in place of a vectorised one: the same numbers",
        28: "the gigabytes that the text of an error speaks of",
        44: "a default that the only caller does not use",
    },
    4: {
        1: "how many rows at a time: memory",
        7: "a comparison of lengths that layouts and bases have passed before",
        31: "all samples are run again, where two were enough",
        41: "a comparison of lengths four lines after another",
    },
    6: {
        2: "a product of the Jacobian by rows in place of two backward passes: the same numbers",
        14: "a grid that reaches one step beyond what counts",
        23: "65 roundings allowed for in place of 64",
        31: "nodes of a graph are looked at again: time",
        39: "the general way of a product that has one of its own: the same numbers",
        42: "one band of rows in place of eight: the same sums",
        44: "how many cotangents at a time: memory",
        50: "how many rows at a time: memory",
        51: "which of two ways draws a set; all sets are equally likely by both",
    },
    7: {
        1: "how many rows at a time: memory",
        12: "a bound on rounds, by a default that the library does not use",
        13: "which number stands for tensors that have no count of writes",
        14: "by how much torch's own generator goes on",
        18: "which line of the caller a warning points at",
        44: "twice a rounding allowed for",
        51: "one cotangent at a time or several: the same numbers",
    },
    8: {
        2: "whether the text of an error shows a value",
        11: "how many examples the text of a remark names",
        45: "what is said of batch norm, which is asked for by its name before",
        47: "a default that the only caller does not use",
        51: "a position just behind a segment is the first of the next: the same number",
        53: "where a search starts: it comes to the same width",
    },
    9: {
        6: "a comparison of lengths that no caller can make differ",
        11: "which of two ways forms the same kernel: memory",
        15: "which of two exact ways, where there are as many weights as outputs: the same numbers",
        42: "a word in the text of a remark",
        47: "a search that does not end goes on for one product more",
    },
}
"""By seed and number of a mistake: why it changes no result."""
BUDGET = 150.0
"""Seconds of tests that a mistake meets, as they were taken without it."""
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip

Edit = tuple[int, int, str]
"""Characters from start to stop of a file are replaced by a text."""


@dataclass(frozen=True)
class Drawn:
    """A mistake, and the line and byte where it is."""

    mutant: Mutant
    place: tuple[int, int]

    def tests(self) -> list[str]:
        text = (SOURCE / self.mutant.file).read_text(encoding="utf-8")
        return in_order(those_that_execute(self.mutant.file, text, self.place), BUDGET)

    def outcome(self) -> Outcome:
        tests = self.tests()
        return outcome(self.mutant, tests) if tests else Outcome("survived", 0.0, "no test executes it")


def drawn(seed: int, count: int) -> list[Drawn]:
    """The first `count` of all places in random order."""
    places = [(name, edit) for name, text in _files() for edit in edits(text)]
    random.Random(seed).shuffle(places)
    texts = dict(_files())
    return [_drawn(name, texts[name], edit) for name, edit in places[:count]]


def _files() -> list[tuple[str, str]]:
    paths = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    kept = [path for path in paths if not any(path.startswith(name) or path.endswith(name) for name in LEFT_OUT)]
    return [(path, (SOURCE / path).read_text(encoding="utf-8")) for path in kept]


def edits(text: str) -> Iterator[Edit]:
    """Every mistake that can be made in a file."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return starts[place[0] - 1] + place[1], starts[place[2] - 1] + place[3]

    def between(left: ast.AST, right: ast.AST, operator: type) -> Edit | None:
        start, stop = span(left)[1], span(right)[0]
        gap = data[start:stop].decode()
        old = _SIGNS[operator]
        if gap.count(old) != 1:
            return None
        at = start + len(gap[: gap.index(old)].encode())
        return at, at + len(old), OPERATORS[operator]

    for node in _walk(ast.parse(text)):
        found: list[Edit | None] = []
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            found.append(between(node.left, node.right, type(node.op)))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found += [between(a, b, type(op)) for a, b, op in zip(sides, sides[1:], node.ops, strict=False)]
        elif isinstance(node, ast.BoolOp):
            found.append(between(node.values[0], node.values[1], type(node.op)))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            found.append((*span(node), str(not node.value)))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            found.append((*span(node), str(node.value + 1)))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            start, stop = span(node)
            found.append((start, stop, data[slice(*span(node.operand))].decode()))
        elif isinstance(node, (ast.If, ast.IfExp)):
            start, stop = span(node.test)
            found.append((start, stop, f"(not ({data[start:stop].decode()}))"))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            found.append((*span(node), "pass"))
        for edit in found:
            if edit is not None:
                yield len(data[: edit[0]].decode()), len(data[: edit[1]].decode()), edit[2]


_SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or",
}  # fmt: skip


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of messages, annotations, decorators, docstrings and type checks."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "exc", "cause", "msg", "type_params"):
            continue
        if isinstance(node, ast.Subscript) and name == "slice" and _shape(node.value):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Assert)):
                yield from _walk(child)


def _shape(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("Float", "Int", "Bool", "Shaped")


def _drawn(name: str, text: str, edit: Edit) -> Drawn:
    """With as many lines around the place as make it unique in the file."""
    start, stop, new = edit
    low, high = text.rfind("\n", 0, start) + 1, text.find("\n", stop)
    while text.count(text[low:high]) > 1:
        low, high = text.rfind("\n", 0, max(0, low - 1)) + 1, min(len(text), text.find("\n", high + 1))
    line = text.count("\n", 0, start) + 1
    after = text[low:start] + new + text[stop:high]
    mutant = Mutant(f"line {line}: {text[start:stop]} -> {new}", name, text[low:high], after, ())
    return Drawn(mutant, (line, len(text[text.rfind("\n", 0, start) + 1 : start].encode())))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw mistakes at random, and see whether the tests notice.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=50, help="of those that are not taken out")
    parser.add_argument(
        "--only", type=int, nargs="*", default=[], help="numbers of the mistakes to look at; all by default"
    )
    parser.add_argument("--run", action="store_true", help="run the tests; else the mistakes are listed")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    options = parser.parse_args(arguments)
    without = TAKEN_OUT.get(options.seed, {})
    every = [(i, one) for i, one in enumerate(drawn(options.seed, options.count + len(without))) if i not in without]
    chosen = [(i, one) for i, one in every[: options.count] if not options.only or i in options.only]
    if not options.run:
        for i, one in chosen:
            print(f"-- {i}  {one.mutant.file}  {one.mutant.name}\n{one.mutant.after}\n")
        return
    noticed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for (i, one), result in zip(chosen, pool.map(Drawn.outcome, [one for _, one in chosen]), strict=True):
            noticed += result.found in ("killed", "timeout")
            print(
                f"{result.found:<8} {result.seconds:5.0f} s  {i:3}  {one.mutant.file}: {one.mutant.name}  {result.by}",
                flush=True,
            )
    print(f"{noticed} of {len(chosen)} mistakes were noticed")


if __name__ == "__main__":
    main()
