"""Puts a mark at the start of each block of the library before it is imported; needs nothing beyond Python itself.

A block is the body of a function, a branch, a loop, a `with`, a `try`, a lambda or a side of `a if c else b`.
Processes that a test starts import this file too, by `STARTED`, and write the marks they hit to a file.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

MARKS = "__seen__"
CHILDREN = "LAPWING_SEEN_BY_CHILDREN"
"""Names the folder that processes started by a test write to."""
STARTED = f"""import os, sys
if {CHILDREN!r} in os.environ:
    sys.path.append({{folder!r}})
    from mutation.marks import write
    sys.path.pop()
    write(os.environ[{CHILDREN!r}])
"""
"""A `sitecustomize.py`, which Python imports at its start; `folder` is that of the tests."""

Block = tuple[str, int]
"""A file under `src/lapwing` and the number of a block of it, in the order of the text."""
Place = tuple[int, int]
"""A line and the byte within it."""


# -- blocks of a text --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """From the first byte of a block to behind its last; `owner` is the statement or expression it belongs to."""

    start: Place
    stop: Place
    owner: ast.AST
    body: list[ast.stmt] | ast.expr
    field: str


def blocks(tree: ast.Module) -> list[Span]:
    """Every block but the module itself and bodies of classes, in the order of the text, outer before inner."""
    found = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody") and not isinstance(node, (ast.Module, ast.ClassDef)):
                if isinstance(value, list) and value:
                    found.append(Span(start_of(value[0]), stop_of(value[-1]), node, value, field))
                elif isinstance(node, (ast.Lambda, ast.IfExp)):
                    found.append(Span(start_of(value), stop_of(value), node, value, field))
    return sorted(found, key=lambda span: (span.start, (-span.stop[0], -span.stop[1])))


def start_of(node: Any) -> Place:
    decorated = getattr(node, "decorator_list", None)
    first = decorated[0] if decorated else node
    return first.lineno, first.col_offset


def stop_of(node: Any) -> Place:
    return node.end_lineno, node.end_col_offset


def marked(text: str, name: str) -> ast.Module:
    """The file with a mark at the start of each block."""
    tree = ast.parse(text)
    for number, span in enumerate(blocks(tree)):
        call = ast.parse(f"{MARKS}.add(({name!r}, {number}))", mode="eval").body
        at: Any = span.body[0] if isinstance(span.body, list) else span.body
        for part in ast.walk(call):
            if isinstance(part, ast.expr):
                ast.copy_location(part, at)
        if isinstance(span.body, list):
            first = 1 if _docstring(span) and len(span.body) > 0 else 0
            span.body.insert(first, ast.copy_location(ast.Expr(call), at))
        else:
            # `add` returns None
            both = ast.copy_location(ast.BoolOp(ast.Or(), [call, span.body]), span.body)
            setattr(span.owner, span.field, both)
    return ast.fix_missing_locations(tree)


def _docstring(span: Span) -> bool:
    first = span.body[0] if isinstance(span.body, list) else None
    function = isinstance(span.owner, (ast.FunctionDef, ast.AsyncFunctionDef))
    return function and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)


# -- the import --------------------------------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        name = path.as_posix().rpartition("/src/lapwing/")[2]
        return compile(marked(path.read_text(encoding="utf-8"), name), str(path), "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "lapwing":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


# -- processes that a test starts --------------------------------------------------------------------------------------


class Written(set[Block]):
    """Marks that are on disk as soon as they are hit, as a process may be killed."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(Path(folder) / f"{os.getpid()}.txt", flags)

    def add(self, block: Block, /) -> None:
        if block not in self:
            super().add(block)
            os.write(self._file, f"{block[1]} {block[0]}\n".encode())


def write(folder: str) -> None:
    """From now on, marks of this process are written to a file in a folder."""
    setattr(builtins, MARKS, Written(folder))
    sys.meta_path.insert(0, Finder())


def written(folder: Path) -> set[Block]:
    """What processes wrote since the last call."""
    found: set[Block] = set()
    for path in folder.glob("*.txt"):
        lines = (line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines())
        found |= {(name, int(number)) for number, _, name in lines}
        path.unlink()
    return found
