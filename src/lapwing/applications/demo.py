"""`python -m lapwing.applications.demo`: the curvature of a small network on scikit-learn's digits, told in a minute.

Trains a 64-32-10 network, fits its curvature as a full matrix, as Kronecker factors and as a diagonal, prints what each
costs and how close it comes, and draws what the curvature says about inputs the network has not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lapwing.estimate import diagonal, full, kfac, kflr
from lapwing.likelihoods import Categorical
from lapwing.linalg import Curvature
from lapwing.tangent import Tangent

PRIOR_PRECISION = 1.0
PICTURE = Path("docs/images/demo.png")
Found = TypeVar("Found")


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return x[train], y[train], x[test], y[test]


def train(x: Tensor, y: Tensor) -> nn.Module:
    """MAP estimate: the prior precision is the weight decay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        decay = sum(p.square().sum() for p in model.parameters())
        (nn.functional.cross_entropy(model(x), y, reduction="sum") + PRIOR_PRECISION / 2 * decay).backward()
        optimiser.step()
    return model.eval()


def timed(run: Callable[[], Found]) -> tuple[Found, float]:
    """The result, and the best of three times in seconds."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return run(), best


def spread(curvature: Curvature, tangent: Tangent, x: Tensor) -> Tensor:
    """Standard deviation of the logits, averaged over classes, under the posterior of this curvature."""
    covariance = curvature.with_prior(PRIOR_PRECISION).covariance(tangent.at(x))
    return covariance.diagonal(dim1=1, dim2=2).sqrt().mean(1)


def main() -> None:
    console = Console()
    x, y, x_test, y_test = load()
    model = train(x, y)
    accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    tangent, likelihood = Tangent(model), Categorical()
    batches = list(zip(x.split(100), y.split(100), strict=True))
    console.print(f"A 64-32-10 network, {tangent.space.size} weights, {len(x)} digits: test accuracy {accuracy:.1%}.\n")

    def gradients() -> None:
        for inputs, targets in batches:
            torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters()))

    epoch = timed(gradients)[1]
    generator = torch.Generator().manual_seed(0)
    fits = {
        "full": timed(lambda: full(tangent, likelihood, batches)),
        "Kronecker, exact": timed(lambda: kflr(tangent, likelihood, batches)),
        "Kronecker, Monte Carlo": timed(lambda: kfac(tangent, likelihood, batches, generator=generator)),
        "diagonal": timed(lambda: diagonal(tangent, likelihood, batches)),
    }
    exact = fits["full"][0].dense()
    reference = spread(fits["full"][0], tangent, x_test)
    table = Table(title="One pass over the data, four structures")
    for column in ("structure", "epochs", "numbers kept", "matrix error", "std. error"):
        table.add_column(column, justify="left" if column == "structure" else "right")
    kept = {"full": tangent.space.size**2, "diagonal": tangent.space.size}
    for name, (curvature, seconds) in fits.items():
        error = float((curvature.dense() - exact).norm() / exact.norm())
        deviation = float(((spread(curvature, tangent, x_test) - reference) / reference).abs().mean())
        numbers = kept.get(name, 65**2 + 32**2 + 33**2 + 10**2)
        table.add_row(name, f"{seconds / epoch:.1f}", f"{numbers:,}", f"{error:.0%}", f"{deviation:.0%}")
    console.print(table)
    console.print(
        "Epochs: time in units of one gradient epoch. Errors are relative to the full structure: of the matrix in "
        "Frobenius norm, and of the standard deviations of the logits on test digits.",
        style="dim",
    )

    turned = x_test.reshape(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    outside = spread(fits["full"][0], tangent, turned)
    console.print(
        f"\nStandard deviation of a logit under the full posterior: {reference.mean():.2f} on test digits, "
        f"{outside.mean():.2f} on the same digits turned by 90 degrees."
    )
    draw(exact, reference, outside, x_test)
    console.print(f"Picture: {PICTURE}")


def draw(matrix: Tensor, inside: Tensor, outside: Tensor, images: Tensor) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 3.6), layout="constrained", width_ratios=(1, 1, 1.25)
    )
    values = torch.linalg.eigvalsh(matrix.double()).flip(0).clamp_min(1e-12)
    left.semilogy(values.numpy(), color="#1f5c7a", label="curvature of the data")
    left.axhline(PRIOR_PRECISION, color="#c8553d", label="prior precision")
    left.set(xlabel="direction in weight space", ylabel="curvature", ylim=(1e-6, None))
    left.set_title(f"The data fix {int((values > PRIOR_PRECISION).sum())} of {len(values)} directions")
    left.legend(frameon=False)
    bins = torch.linspace(0, float(torch.cat([inside, outside]).max()), 40).numpy()
    middle.hist(inside.numpy(), bins, color="#1f5c7a", alpha=0.8, label="test digits")
    middle.hist(outside.numpy(), bins, color="#c8553d", alpha=0.6, label="turned by 90 degrees")
    middle.set(xlabel="standard deviation of the logits", ylabel="images")
    middle.set_title("It is less sure of what it has not seen")
    middle.legend(frameon=False)
    middle.set_ylim(0, 1.35 * middle.get_ylim()[1])
    order = inside.argsort()
    strip = torch.cat([order[:6], order[-6:]])
    tiles = nn.functional.pad(images[strip].reshape(12, 8, 8), (1, 1, 1, 1))
    rows = tiles.reshape(2, 6, 10, 10).permute(0, 2, 1, 3).reshape(20, 60)
    right.imshow(1 - rows.numpy(), cmap="gray")
    right.set_yticks([4.5, 14.5], ["surest", "least\nsure"])
    right.set_xticks([])
    right.set_title("Test digits by posterior uncertainty")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
