"""Predictions from any number of threads: equal to one thread's, and the model is not even seen to change."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.tables.estimators import LaplaceClassifier
from unchanged import unchanged

THREADS = 8


class Attentive(nn.Module):
    """Attention of three kinds, dropout, normalisation by the batch, and a buffer that every pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.encoder(self.embed(x.unflatten(1, (4, 3))))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + F.scaled_dot_product_attention(h, h, h)
        return self.head(self.drop(self.norm(h.mean(1))))


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
    )


MODELS = {"dense": dense, "attentive": Attentive}


@cache
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 12, generator=generator), torch.randint(3, (24,), generator=generator)


def fitted(model: nn.Module, subset: str, structure: str, **options: Any) -> Any:
    found = Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure, **options)
    found.fit([data()])
    return found


Prediction = Callable[[Tensor, torch.Generator], Tensor]


def predictions(model: nn.Module) -> dict[str, Prediction]:
    """Every kind of prediction, of inputs and a generator."""
    kron = fitted(model, "all", "kron")
    last = fitted(model, "last_layer", "kron", **({"last_layer_name": "head"} if hasattr(model, "head") else {}))
    chosen = torch.arange(0, kron.n_params, 7)
    subnet = fitted(model, "subnetwork", "full", subnetwork_indices=chosen)
    gp = fitted(model, "all", "gp")
    diag = fitted(model, "all", "diag")
    numbers = Laplace(model, "regression", subset_of_weights="all", hessian_structure="kron")
    numbers.fit([(data()[0], F.one_hot(data()[1], 3).float())])
    return {
        "probit": lambda x, g: kron(x),
        "mc": lambda x, g: kron(x, link_approx="mc", n_samples=5, generator=g),
        "nn": lambda x, g: kron(x, pred_type="nn", n_samples=3, generator=g),
        "nn diag": lambda x, g: diag(x, pred_type="nn", n_samples=3, generator=g),
        "functional": lambda x, g: kron.functional_samples(x, n_samples=3, generator=g),
        "functional nn": lambda x, g: kron.functional_samples(x, "nn", n_samples=3, generator=g),
        "predictive": lambda x, g: diag.predictive_samples(x, n_samples=3, generator=g),
        "joint": lambda x, g: numbers(x, joint=True)[1],
        "moments": lambda x, g: numbers(x)[1],
        "last layer": lambda x, g: last(x),
        "last layer nn": lambda x, g: last(x, pred_type="nn", n_samples=3, generator=g),
        "subnetwork": lambda x, g: subnet(x),
        "subnetwork nn": lambda x, g: subnet(x, pred_type="nn", n_samples=3, generator=g),
        "gp": lambda x, g: gp(x),
    }


def switches(filters: bool = True) -> tuple:
    """What the whole process shares and a prediction might be tempted to change."""
    cuda = torch.backends.cuda
    return (
        torch.backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.backends.mkldnn.enabled,  # pyright: ignore[reportAttributeAccessIssue]
        F.has_torch_function,
        F.has_torch_function_unary,
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        [entry[0] for entry in warnings.filters if filters and "tangent" not in type(entry[1]).__module__],
    )


@contextmanager
def watched(model: nn.Module, filters: bool = True) -> Iterator[list[str]]:
    """A thread that looks, all the time, at switches and at the modes and tensors of the model: what it saw change."""
    modules, seen, done = list(model.modules()), [], threading.Event()

    def look() -> tuple:
        tensors = [(m._parameters.copy(), m._buffers.copy()) for m in modules]
        held = [[(key, id(value)) for each in pair for key, value in each.items()] for pair in tensors]
        versions = [t._version for pair in tensors for each in pair for t in each.values() if t is not None]
        hooks = [len(m._forward_hooks) for m in modules]
        return switches(filters), [m.training for m in modules], held, versions, hooks

    before = look()

    def watch() -> None:
        while not done.is_set():
            for found, expected in zip(look(), before, strict=True):
                if found != expected and len(seen) < 3:
                    seen.append(f"{found} instead of {expected}")
            done.wait(1e-4)

    thread = threading.Thread(target=watch)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # threads take turns more often than they usually would
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def check(name: str, training: bool, rounds: int, share: int = 1) -> None:
    """Every thread makes `rounds` predictions of each kind (of one in `share`), of batches of different sizes."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model(data()[0])  # running statistics
    model.train(training)
    kinds = list(predictions(model).items())
    x = data()[0]
    jobs = [(kind, predict, x[: 6 + turn % 3], turn) for turn in range(rounds) for kind, predict in kinds]

    def run(job: tuple[str, Prediction, Tensor, int]) -> Tensor:
        _, predict, inputs, seed = job
        return predict(inputs, torch.Generator().manual_seed(seed))

    with unchanged(model), watched(model) as seen, ThreadPoolExecutor(THREADS) as pool:
        # no thread has predicted before: caches are filled by several at once; each starts somewhere else
        turned = [(jobs[n:] + jobs[:n])[::share] for n in range(THREADS)]
        found = list(pool.map(lambda own: [run(job) for job in own], turned))
    assert not seen
    used = {(job[0], job[3]): job for own in turned for job in own}
    expected = {key: run(job) for key, job in used.items()}
    for own, order in zip(found, turned, strict=True):
        for value, (kind, _, _, seed) in zip(own, order, strict=True):
            torch.testing.assert_close(value, expected[kind, seed], rtol=1e-5, atol=1e-6, msg=f"{kind}, seed {seed}")


@pytest.mark.parametrize(("name", "training"), [("attentive", True), ("dense", False)])
def test_predictions_of_threads_are_those_of_one(name: str, training: bool) -> None:
    check(name, training, 1, share=7)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_many_predictions_of_threads_are_those_of_one(name: str, training: bool) -> None:
    check(name, training, 25)  # 200 predictions of each of 14 kinds, 350 in each of the 8 threads


def test_fits_and_predictions_beside_training() -> None:
    """A user's thread runs the model in train mode: its dropout is on all the time, and its statistics are its own."""
    torch.manual_seed(0)
    model = Attentive()
    model(data()[0])
    la = fitted(model, "all", "kron")
    x, done, modes = data()[0], threading.Event(), []

    def use() -> None:
        while not done.is_set():
            modes.append((model.training, bool((model.drop(x) == 0).any()), model.encoder.dropout.training))

    thread = threading.Thread(target=use)
    with watched(model) as seen:
        thread.start()
        for _ in range(2):
            la(x[:6], pred_type="nn", n_samples=3)
            la(x[:6])
            fitted(model, "all", "diag")
        done.set()
        thread.join()
    assert set(modes) == {(True, True, True)}
    assert not seen


def test_threads_of_an_estimator() -> None:
    x, y = data()
    estimator = LaplaceClassifier(epochs=5, random_state=0).fit(np.asarray(x), np.asarray(y))
    model, before = estimator.model_, switches()
    # scikit-learn's own check of the inputs sets a filter of warnings while it runs
    with unchanged(model), watched(model, filters=False) as seen, ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda _: estimator.predict_proba(np.asarray(x)), range(THREADS)))
    assert not seen
    assert switches() == before
    for each in found:
        np.testing.assert_allclose(each, estimator.predict_proba(np.asarray(x)), rtol=1e-6)
