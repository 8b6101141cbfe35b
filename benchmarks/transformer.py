"""What runs on a transformer of GPT-2 small's shape (124M weights, random ones), in what time and memory.

Two ways to use it. As a classifier: a head of four classes on the last token, sequences of 16 tokens. As a language
model: the next token's logits, 50,257 of them, by the table itself, which is tied. One measurement is a process of its
own: the time of a gradient over all data (the unit), of a fit, and of the first linearised prediction of 8 inputs,
decompositions included; the peak of resident memory, and how much of it lies above what was there before the fit
(Linux). What is refused, runs out of `--memory` GB or of `--limit` seconds says so: that is a figure too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, context, write
from torch import Tensor, nn

from lapwing import Laplace, estimate
from lapwing.errors import LapwingError
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent

SHAPES = {
    "gpt2": {"words": 50257, "places": 1024, "width": 768, "heads": 12, "layers": 12},
    "tiny": {"words": 211, "places": 32, "width": 24, "heads": 2, "layers": 2},
}
POINTS, PREDICTED, TOKENS, CLASSES = 32, 8, 16, 4


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.inward(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.mT / (width // self.heads) ** 0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self.outward(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.narrow(nn.functional.gelu(self.widen(self.between(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Tokens [B, T] to the last token's classes [B, 4], or, without a head, to its next token's logits [B, words]."""

    def __init__(self, classes: int | None, words: int, places: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.after = nn.LayerNorm(width)
        self.head = nn.Linear(width, words if classes is None else classes, bias=classes is not None)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)
        if classes is None:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.after(self.blocks(x)[:, -1]))


def frozen_tables(model: nn.Module) -> nn.Module:
    """Without the two tables: what is left are products and vectors."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
    return model


def whole(model: nn.Module) -> nn.Module:
    return model


Batches = list[tuple[Tensor, Tensor]]
Fit = Callable[[nn.Module, Batches], Any]


def laplace(subset: str, structure: str, **options: Any) -> Fit:
    def fit(model: nn.Module, batches: Batches) -> Any:
        la = Laplace(model, "classification", subset, structure, **options)
        la.fit(batches)
        return la

    return fit


def sketched(model: nn.Module, batches: Batches) -> Any:
    return estimate.sketched(Tangent(model), Categorical(), batches, steps=10, rows=2000)


WORK: dict[str, tuple[str, Callable[[nn.Module], nn.Module], Fit]] = {
    "diag": ("classifier", whole, laplace("all", "diag")),
    "diag, without the tables": ("classifier", frozen_tables, laplace("all", "diag")),
    "kron": ("classifier", whole, laplace("all", "kron")),
    "kron, without the tables": ("classifier", frozen_tables, laplace("all", "kron")),
    "last layer, full": ("classifier", whole, laplace("last_layer", "full")),
    "matrix-free": ("classifier", whole, laplace("all", "matrix_free")),
    "gp": ("classifier", whole, laplace("all", "gp")),
    "sketched": ("classifier", whole, sketched),
    "last layer, diag": ("language model", whole, laplace("last_layer", "diag")),
    "last layer, kron": ("language model", whole, laplace("last_layer", "kron")),
}


def data(classes: int, words: int, points: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(words, (points, TOKENS), generator=generator)
    y = torch.randint(classes, (points,), generator=generator)
    return list(zip(x.split(8), y.split(8), strict=True))


def gradient(model: nn.Module, batches: Batches) -> None:
    trainable = [each for each in model.parameters() if each.requires_grad]
    for x, y in batches:
        torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), trainable)


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def made(name: str, shape: str) -> tuple[nn.Module, Batches]:
    role, prepare, _ = WORK[name]
    sizes = SHAPES[shape]
    torch.manual_seed(0)
    model = prepare(Transformer(CLASSES if role == "classifier" else None, **sizes))
    return model, data(CLASSES if role == "classifier" else sizes["words"], sizes["words"], POINTS)


def child(name: str, shape: str, threads: int, memory: float) -> None:
    """Prints one measurement; a refusal is one too."""
    torch.set_num_threads(threads)
    fit = WORK[name][2]
    small, few = made(name, "tiny")
    fit(small, few[:1])(few[0][0][:PREDICTED])  # libraries are loaded
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    model, batches = made(name, shape)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        gradient(model, batches)
        times.append(time.perf_counter() - start)
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    found: dict[str, Any] = {"weights": sum(each.numel() for each in model.parameters()), "trainable": trainable}
    found["gradient"] = min(times)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    try:
        start = time.perf_counter()
        predict = fit(model, batches)
        found["fit"] = time.perf_counter() - start
        start = time.perf_counter()
        predict(batches[0][0][:PREDICTED])
        found["prediction"] = time.perf_counter() - start
    except LapwingError as error:
        found["refused"] = str(error)
    except (RuntimeError, MemoryError) as error:
        found["failed"] = str(error).splitlines()[0]
    found["peak"] = resident("VmHWM")
    found["above_start"] = found["peak"] - before
    print(json.dumps(found))


def measured(name: str, shape: str, threads: int, limit: float, memory: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--shape", shape]
    command += ["--threads", str(threads), "--memory", str(memory / 1e9)]
    row: dict[str, Any] = {"work": name, "as": WORK[name][0]}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"more than {limit:.0f} seconds"}
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or [f"ended with {ended.returncode}"]
        return row | {"failed": said[0]}
    return row | json.loads(ended.stdout)


def line(row: dict[str, Any]) -> str:
    head = f"{row['as']:15} {row['work']:26}"
    why = row.get("refused") or row.get("failed")
    if why:
        return f"{head} does not run: {why}"
    epochs = f"{row['fit'] / row['gradient']:6.1f} gradients"
    sizes = f"peak {row['peak'] / 1e9:5.2f} GB, {row['above_start'] / 1e9:5.2f} GB above the start"
    return f"{head} fit {row['fit']:7.2f} s {epochs}, prediction {row['prediction']:7.2f} s, {sizes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child")
    parser.add_argument("--shape", default="gpt2", choices=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one measurement may take")
    parser.add_argument("--memory", type=float, default=12.0, help="GB that it may take")
    parser.add_argument("--only", nargs="*", default=list(WORK))
    parser.add_argument("--out", type=Path, default=RESULTS, help="another folder, for a trial")
    parser.add_argument("--no-peers", action="store_true", help="there are none here")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.shape, arguments.threads, 1e9 * arguments.memory)
        return
    where = context("transformer")
    rows = []
    for name in arguments.only:
        rows.append(measured(name, arguments.shape, arguments.threads, arguments.limit, 1e9 * arguments.memory))
        print(line(rows[-1]), flush=True)
    sizes = {"points": POINTS, "predicted": PREDICTED, "tokens": TOKENS, "classes": CLASSES}
    limits = {"seconds": arguments.limit, "bytes": 1e9 * arguments.memory, "threads": arguments.threads}
    write(where, {"shape": SHAPES[arguments.shape], **sizes, "limits": limits, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
