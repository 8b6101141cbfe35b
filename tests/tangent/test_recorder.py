"""Recorder and probe, each for itself: what is seen of an operation, and that nothing of it stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import DataError, ModelError, UnsupportedOperationError
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.probe import probe
from lapwing.tangent.record import Record, Recorder
from lapwing.tangent.samples import SampleAxis, candidates, changed_sample, differs
from lapwing.tangent.sources import Alias, Derived
from problems import Net, parameter
from unchanged import unchanged


def record(model: nn.Module, x: Tensor) -> Record:
    space = ParamSpace.of(model)
    recorder = Recorder(space, dict(model.named_parameters()), x)
    with recorder:
        model(x)
    return recorder.record


def sources(model: nn.Module, x: Tensor) -> list:
    return [source for _, use in record(model, x).uses for source in use.sources]


# -- recorder -------------------------------------------------------------------------------------------------------


def test_views_of_a_parameter_are_known_as_such() -> None:
    views = {
        "transpose": (lambda w: w.T, (0, (4, 3), (1, 0))),
        "chunk": (lambda w: w.chunk(2)[1], (6, (2, 3), (0, 1))),
        "reshape": (lambda w: w.reshape(6, 2), (0, (6, 2), (0, 1))),
        "added axis": (lambda w: w.unsqueeze(0), (0, (1, 4, 3), (0, 1, 2))),
        "copy": (lambda w: w.clone(), (0, (4, 3), (0, 1))),
        "permuted copy": (lambda w: w.T.contiguous(), (0, (4, 3), (1, 0))),
        "rows by their numbers": (lambda w: F.embedding(torch.tensor([[1, 2]]), w), (3, (1, 2, 3), (0, 1, 2))),
        "a row by its number": (lambda w: w[1:][torch.tensor(2)], (9, (3,), (0,))),
    }
    for name, (view, expected) in views.items():
        model = Net(lambda m, x, view=view: x.sum() * view(m.w), w=parameter(4, 3))
        (source,) = sources(model, torch.randn(2, 3))
        assert isinstance(source, Alias), name
        assert (source.start, source.stored, source.order) == expected, name


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[::2],
        lambda w: w[:, 1:],
        lambda w: w[[0, 0]],
        lambda w: w.repeat(2, 1),
        lambda w: w * 2,
        lambda w: w.diagonal(),
        lambda w: w.clone().mul_(2),
        lambda w: w.flatten().unfold(0, 2, 1),
        lambda w: F.embedding(torch.tensor([0, 2]), w),
        lambda w: F.embedding(torch.tensor([2, 1]), w),
        lambda w: F.embedding(torch.tensor([0, 1]), w, padding_idx=1),
        lambda w: F.embedding(torch.tensor([0, 1]), w, scale_grad_by_freq=True),
        lambda w: w[torch.tensor([-2, -1])],
    ],
)
def test_what_is_no_dense_view_is_derived(view) -> None:
    model = Net(lambda m, x: x.sum() * view(m.w), w=parameter(4, 3))
    (source,) = sources(model, torch.randn(2, 3))
    assert isinstance(source, Derived)
    assert source.names == {"w"}


def test_what_is_only_repeated_is_taken_for_what_it_repeats() -> None:
    def body(m, x):
        token = m.token.expand(len(x), -1, -1)
        kind = F.embedding(torch.ones(len(x), 4).long(), m.kind)
        return (torch.cat([x, token], 1) + m.place.repeat(len(x), 1, 1) + kind).flatten(1)

    model = Net(body, token=parameter(1, 1, 2), place=parameter(1, 4, 2), kind=parameter(3, 2))
    found = Tangent(model).at(torch.randn(3, 3, 2))
    assert not found.record.opaque
    assert not found.record.derived
    (joined, _), (added, _), (typed, _) = found.uses
    assert [source.names for source in joined.sources] == [{"token"}]
    assert [type(source) for source in joined.sources + added.sources + typed.sources] == [Alias] * 3


def test_what_is_repeated_for_a_product_is_derived() -> None:
    model = Net(lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)).flatten(1), w=parameter(1, 3, 2))
    found = Tangent(model).at(torch.randn(4, 5, 3))
    assert (found.record.derived or found.record.opaque)["w"] in ("expand", "bmm")


def test_a_use_without_gradient_is_none() -> None:
    model = Net(lambda m, x: m.a(x) + F.linear(x, m.a.weight.detach()), a=nn.Linear(3, 2))
    assert [event.name for event in record(model, torch.randn(2, 3)).events] == ["linear"]


def test_data_is_followed_through_writes() -> None:
    def body(m, x):
        buffer = torch.zeros(len(x), 3)
        buffer[:, :2] = x
        other = torch.zeros(len(x), 3)
        other.copy_(buffer)
        return m.a(other)

    (event,) = record(Net(body, a=nn.Linear(3, 2)), torch.randn(2, 2)).events
    assert event.dependent
    assert event.use is not None


def test_attention_is_seen_inside_and_restored() -> None:
    before = F.has_torch_function
    mha = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Net(lambda m, x: m.mha(x, x, x)[0], mha=mha)
    names = [use.operation for _, use in record(model, torch.randn(2, 3, 4)).uses]
    assert names == ["linear", "linear"]
    assert F.has_torch_function is before
    bad = Net(lambda m, x: m.mha(x, x[:, :, :2], x)[0], mha=mha)
    with pytest.raises(AssertionError):
        record(bad, torch.randn(2, 3, 4))
    assert F.has_torch_function is before


def test_embedding_that_renormalises_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 2))
    with unchanged(model), pytest.raises(UnsupportedOperationError, match="max_norm"):
        Tangent(model).at(torch.tensor([1, 2]))


BAGS = torch.tensor([[1, 2], [0, 3]])
RENORMALISED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding by keyword": lambda x, w: F.embedding(x, w, max_norm=0.1),
    "embedding by position": lambda x, w: F.embedding(x, w, None, 0.1),
    "embedding, padded": lambda x, w: F.embedding(x, w, 0, 0.1),
    "embedding_bag by keyword": lambda x, w: F.embedding_bag(x, w, max_norm=0.1),
    "embedding_bag by position": lambda x, w: F.embedding_bag(x, w, None, 0.1),
}
LEFT_ALONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda x, w: F.embedding(x, w),
    "embedding, padded": lambda x, w: F.embedding(x, w, padding_idx=1),
    "embedding, padded by position": lambda x, w: F.embedding(x, w, 1),
    "embedding, no norm": lambda x, w: F.embedding(x, w, 1, None, 1.0),
    "embedding_bag": lambda x, w: F.embedding_bag(x, w),
    "embedding_bag with offsets": lambda x, w: F.embedding_bag(x.flatten(), w, torch.tensor([0, 2])),
    "embedding_bag with offsets by keyword": lambda x, w: F.embedding_bag(x.flatten(), w, offsets=torch.tensor([0, 2])),
}


@pytest.mark.parametrize("name", RENORMALISED)
def test_a_norm_of_a_table_is_seen_by_position_and_by_keyword(name: str) -> None:
    model = Net(lambda m, x: RENORMALISED[name](x, m.a.weight).flatten(1), a=nn.Embedding(5, 3))
    func = F.embedding_bag if "bag" in name else F.embedding
    with unchanged(model), pytest.raises(UnsupportedOperationError, match=f"{func.__name__} with max_norm rewrites"):
        Tangent(model).at(BAGS)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_arguments_in_the_place_of_a_norm_are_none(name: str) -> None:
    model = Net(lambda m, x: LEFT_ALONE[name](x, m.a.weight).flatten(1), a=nn.Embedding(5, 3))
    expected = model(BAGS).detach()
    torch.testing.assert_close(Tangent(model).at(BAGS).value, expected)


ACTIVE: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "dropout": (lambda x: F.dropout(x), True),
    "dropout, off by keyword": (lambda x: F.dropout(x, training=False), False),
    "dropout, off by position": (lambda x: F.dropout(x, 0.5, False), False),
    "dropout, on by position": (lambda x: F.dropout(x, 0.5, True), True),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), False),
    "dropout of nothing by keyword": (lambda x: F.dropout(x, p=0.0, training=True), False),
    "alpha_dropout": (lambda x: F.alpha_dropout(x), False),
    "alpha_dropout, on": (lambda x: F.alpha_dropout(x, 0.5, True), True),
    "torch.dropout, on": (lambda x: torch.dropout(x, 0.5, True), True),
    "torch.dropout, on by keyword": (lambda x: torch.dropout(x, p=0.5, train=True), True),
    "torch.dropout, off": (lambda x: torch.dropout(x, 0.5, False), False),
    "torch.dropout, off by keyword": (lambda x: torch.dropout(x, p=0.5, train=False), False),
    "attention": (lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0], False),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1)[:, 0], True,
    ),
    "attention with dropout by position": (
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], None, 0.1)[:, 0], True,
    ),
    "batch_norm": (lambda x: F.batch_norm(x, torch.ones(2), 2 * torch.ones(2)), False),
    "batch_norm by its batch": (lambda x: F.batch_norm(x, None, None, training=True), True),
    "batch_norm by its batch, by position": (lambda x: F.batch_norm(x, None, None, None, None, True), True),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVE)
def test_random_and_coupled_operations_are_told_from_quiet_ones(name: str) -> None:
    function, refused = ACTIVE[name]
    model = Net(lambda m, x: function(m.a(x)), a=nn.Linear(3, 2))
    x = torch.randn(4, 3)
    if refused:
        with unchanged(model), pytest.raises(ModelError, match=r"is active \(train mode\)|couples its samples"):
            Tangent(model).at(x)
    else:
        torch.testing.assert_close(Tangent(model).at(x).value, model(x).detach())


# -- samples --------------------------------------------------------------------------------------------------------


def test_candidates_cover_every_way_samples_lie_on_an_axis() -> None:
    assert candidates([3], 3) == [SampleAxis(0, 1, 3, 1)]
    assert candidates([12, 5], 3) == [SampleAxis(0, 1, 3, 4), SampleAxis(0, 2, 3, 2), SampleAxis(0, 4, 3, 1)]
    assert candidates([2, 4], 3) == []
    assert candidates([3, 3], 3) == [SampleAxis(0, 1, 3, 1), SampleAxis(1, 1, 3, 1)]


@pytest.mark.parametrize("axis", candidates([4, 12], 3) + candidates([6, 2], 3))
def test_split_gathers_what_member_marks(axis: SampleAxis) -> None:
    sizes = (4, 12) if axis.axis else (6, 2)
    values = torch.arange(sizes[0] * sizes[1]).reshape(sizes)
    split = axis.split(values, lead=0, features=0)
    assert split.shape[0] == 3
    for sample in range(3):
        marked = values[axis.member(sizes, sample).expand(sizes)]
        assert sorted(split[sample].tolist()) == sorted(marked.tolist())


def test_changed_sample_changes_one_sample_only() -> None:
    x = {"a": torch.randn(3, 2), "b": torch.randint(9, (3, 4)), "mask": torch.ones(5, 5)}
    other = changed_sample(x, 1)
    for key in ("a", "b"):
        assert torch.equal(other[key][[0, 2]], x[key][[0, 2]])
    assert not torch.equal(other["a"][1], x["a"][1])
    assert torch.equal(other["mask"], x["mask"])
    assert changed_sample(torch.ones(3, 2, dtype=torch.long), 0) is None
    assert not torch.equal(changed_sample(torch.zeros(3, 2), 0), torch.zeros(3, 2))


def test_differs_ignores_rounding_and_equal_infinities() -> None:
    a = torch.tensor([1.0, float("inf"), float("nan"), 0.0, 1e-9])
    assert not bool(differs(a, a.clone()).any())
    assert not bool(differs(a, a * (1 + 1e-7)).any())
    b = torch.tensor([1.1, float("inf"), float("nan"), 0.0, float("-inf")])
    assert differs(a, b).tolist() == [True, False, False, False, True]


# -- probe ----------------------------------------------------------------------------------------------------------


def axes(model: nn.Module, x: Tensor) -> list[SampleAxis]:
    found = probe(model, ParamSpace.of(model), dict(model.named_parameters()), x)
    assert found.settled
    assert not found.opaque
    return list(found.axes.values())


def test_probe_of_an_encoder_layer() -> None:
    """in_proj sees [T, N, E]; out_proj sees [T N, E], samples innermost."""
    layer = nn.TransformerEncoderLayer(8, 2, 4, batch_first=True).double().eval()
    found = axes(layer, torch.randn(5, 4, 8).double())
    assert found[0] == SampleAxis(1, 1, 5, 1)
    assert found[1] == SampleAxis(0, 4, 5, 1)
    assert found[-1] == SampleAxis(0, 1, 5, 1)


def test_probe_is_kept_per_shape() -> None:
    calls = []
    model = Net(lambda m, x: (calls.append(len(x)), m.a(x))[1], a=nn.Linear(3, 2))
    tangent = Tangent(model)
    x = torch.randn(4, 3)
    tangent.at(x)
    first = len(calls)
    tangent.at(x + 1)
    assert len(calls) == first + 1
    tangent.at(x[:3])
    assert len(calls) > first + 2


def test_what_is_not_seen_is_named() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    model = Net(lambda m, x: F.linear(x, Hidden.apply(m.w)) + m.b, w=parameter(2, 3), b=parameter(2))
    found = probe(model, ParamSpace.of(model), dict(model.named_parameters()), torch.randn(4, 3))
    assert found.opaque == {"w": "an operation that cannot be seen"}


def test_wrong_outputs_are_named() -> None:
    x = torch.randn(4, 3)
    cases = {
        r"shape \(4,\)": lambda m, x: m.a(x)[:, 0],
        "3 rows for a batch of 4": lambda m, x: m.a(x)[1:],
        "returns tuple": lambda m, x: (m.a(x), x),
    }
    for message, body in cases.items():
        model = Net(body, a=nn.Linear(3, 2))
        with unchanged(model), pytest.raises(ModelError, match=message):
            Tangent(model).at(x)


def test_errors_of_the_forward_pass_keep_their_cause() -> None:
    model = nn.Linear(3, 2)
    with unchanged(model), pytest.raises(ModelError, match=r"\(4, 5\)") as caught:
        Tangent(model).at(torch.randn(4, 5))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        Tangent(nn.Linear(3, 2)).at(torch.zeros(0, 3))


# -- the model stays as it is ----------------------------------------------------------------------------------------


def test_a_counting_buffer_comes_back() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x)

    model = Counter()
    with unchanged(model):
        Tangent(model).at(torch.randn(4, 3)).rows()


def test_the_fast_path_comes_back_after_an_exception() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 3, batch_first=True).eval()
    assert torch.backends.mha.get_fastpath_enabled()
    with unchanged(layer), pytest.raises(AssertionError, match="embedding dimension"):  # torch's own, passed on
        Tangent(layer).at(torch.randn(2, 3, 5))
    assert torch.backends.mha.get_fastpath_enabled()
    kernels = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    assert kernels == (True, True)


def test_hooks_of_the_user_run_and_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: None)
    with unchanged(model):
        Tangent(model).at(torch.randn(4, 3)).rows()
    assert seen


def test_another_thread_is_not_recorded() -> None:
    """The mode belongs to the thread that records."""
    model = nn.Linear(3, 2)

    def body(m, x):
        thread = threading.Thread(target=lambda: model(torch.randn(7, 3)))
        thread.start()
        thread.join()
        return m.a(x)

    net = Net(body, a=model)
    assert len(record(net, torch.randn(2, 3)).events) == 1
