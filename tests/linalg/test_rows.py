"""Where entries live: layouts, segments, and rows that are taken apart and put together without being spelled out."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts import close, generator, normal, outer, positions, spelled_out
from lapwing.linalg import DenseRows, DiagonalPrecision, LookupRows, MatrixLayout, OuterRows, Piece, Segments
from lapwing.linalg.budget import chunks
from lapwing.linalg.layout import merge_segments
from lapwing.linalg.rows import Places, assemble, connected

fast = settings(deadline=None, max_examples=60, derandomize=True)


Spec = tuple[Any, ...]
"""Plain values to make an object of: the runtime type check draws random numbers, which strategies may not."""


@st.composite
def layouts(draw: st.DrawFn) -> Spec:
    """Any permutation of up to four stored axes, read as groups, rows and columns; a bias before, after or absent."""
    groups, rows, first, second = (draw(st.integers(1, 3)) for _ in range(4))
    sizes = [groups, rows, first, second]
    order = draw(st.permutations(range(4)))
    stored = [0] * 4
    for axis, size in zip(order, sizes, strict=True):
        stored[axis] = size
    start = draw(st.integers(0, 3))
    bias = draw(st.sampled_from(["none", "after", "before"]))
    after = start + prod(sizes) + draw(st.integers(0, 2))
    if bias == "before":
        start += groups * rows
    where = {"none": None, "after": after, "before": 0}[bias]
    return start, tuple(stored), tuple(order), groups, rows, first * second, where


def end(layout: MatrixLayout) -> int:
    return max(stop for _, stop in layout.segments) + 1


@fast
@given(layouts(), st.sampled_from([(), (2,), (2, 3)]))
def test_gather_reads_every_entry_from_its_counted_position(spec: Spec, lead: tuple[int, ...]) -> None:
    layout = MatrixLayout(*spec)
    v = normal(generator(), *lead, end(layout))
    close(layout.gather(v), v[..., positions(layout)])


@fast
@given(layouts(), st.sampled_from([(), (2,), (2, 3)]))
def test_scatter_add_undoes_gather_and_adds(spec: Spec, lead: tuple[int, ...]) -> None:
    layout = MatrixLayout(*spec)
    v = normal(generator(), *lead, end(layout))
    inside = torch.zeros(end(layout), dtype=torch.bool)
    inside[positions(layout).flatten()] = True
    out = v.clone()
    layout.scatter_add(layout.gather(v), out)
    close(out, torch.where(inside, 2 * v, v))


@fast
@given(layouts())
def test_the_segments_of_a_layout_are_the_positions_it_reads(spec: Spec) -> None:
    layout = MatrixLayout(*spec)
    covered = torch.cat([torch.arange(*segment) for segment in layout.segments])
    assert covered.sort().values.tolist() == positions(layout).flatten().sort().values.tolist()


@fast
@given(layouts())
def test_a_moved_layout_reads_the_same_entries_from_local_coordinates(spec: Spec) -> None:
    layout = MatrixLayout(*spec)
    v = normal(generator(), end(layout))
    place = merge_segments(layout.segments)
    close(layout.moved(place).gather(place.gather(v)), layout.gather(v))


@fast
@given(layouts(), st.sampled_from([1, 3]))
def test_outer_rows_are_sums_of_outer_products(spec: Spec, shared: int) -> None:
    layout = MatrixLayout(*spec)
    piece = outer(layout, generator(), shared)
    expected = spelled_out([piece], end(layout))
    close(assemble([piece], end(layout), slice(0, 4)), expected)
    close(assemble([piece], end(layout), slice(1, 3)), expected[:, 1:3])
    close(assemble(piece.split(), end(layout), slice(0, 4)), expected)


# -- segments -------------------------------------------------------------------------------------------------------


@st.composite
def intervals(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Disjoint intervals in any order, some of them touching."""
    cuts = sorted(draw(st.sets(st.integers(0, 20), min_size=2, max_size=8)))
    found = list(itertools.pairwise(cuts))
    kept = draw(st.lists(st.sampled_from(found), min_size=1, unique=True))
    return draw(st.permutations(kept))


@fast
@given(intervals())
def test_segments_gather_and_scatter_are_inverse(found: list[tuple[int, int]]) -> None:
    segments = Segments(tuple(found))
    v = normal(generator(), 2, 21)
    out = torch.zeros_like(v)
    segments.scatter(segments.gather(v), out)
    inside = torch.zeros(21, dtype=torch.bool)
    for start, stop in found:
        inside[start:stop] = True
    close(out, v * inside)
    assert segments.size == int(inside.sum()) == segments.gather(v).shape[-1]


@fast
@given(intervals())
def test_local_positions_are_those_of_gather(found: list[tuple[int, int]]) -> None:
    segments = Segments(tuple(found))
    flat = segments.gather(torch.arange(21))
    for local, position in enumerate(flat.tolist()):
        assert segments.local(position) == local
    for position in set(range(21)) - set(flat.tolist()):
        with pytest.raises(IndexError, match=f"position {position} lies in none"):
            segments.local(position)


@fast
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 5)), min_size=1, max_size=6))
def test_merged_segments_are_the_union_sorted_and_disjoint(found: list[tuple[int, int]]) -> None:
    given_segments = [(start, start + length) for start, length in found]
    merged = merge_segments(given_segments)
    expected = sorted({p for start, stop in given_segments for p in range(start, stop)})
    assert merged.gather(torch.arange(21)).tolist() == expected
    assert all(merged.contains(segment) for segment in given_segments)


# -- groups of rows -------------------------------------------------------------------------------------------------

TOTAL = 24


@st.composite
def pieces(draw: st.DrawFn) -> list[Spec]:
    """Pieces anywhere in 0..24, which share parameters or not: (kind, start, then size, or bias and positions)."""
    found: list[Spec] = []
    for kind in draw(st.lists(st.sampled_from(["dense", "outer", "lookup"]), min_size=1, max_size=4)):
        if kind == "dense":
            found.append((kind, draw(st.integers(0, TOTAL - 5)), draw(st.integers(1, 5))))
            continue
        start = draw(st.integers(0, TOTAL - 12))
        bias = draw(st.none() | st.integers(start + 6, TOTAL - 3)) if kind == "outer" else None
        found.append((kind, start, bias, draw(st.sampled_from([1, 3]))))
    return found


def built(specs: list[Spec]) -> list[Piece]:
    found: list[Piece] = []
    for number, (kind, start, *rest) in enumerate(specs):
        g = generator(number)
        if kind == "dense":
            found.append(DenseRows(start, normal(g, 2, 4, rest[0])))
            continue
        layout = MatrixLayout(start, (3, 2), (0, 1), 1, 3, 2, rest[0])
        if kind == "lookup":
            found.append(LookupRows(layout, normal(g, 2, 4, 5, 2), torch.randint(3, (4, 5), generator=g)))
        else:
            found.append(outer(layout, g, rest[1]))
    return found


def cells(segments: tuple[tuple[int, int], ...]) -> set[int]:
    return {position for start, stop in segments for position in range(start, stop)}


@fast
@given(pieces())
def test_connected_groups_share_no_parameter_and_cannot_be_finer(specs: list[Spec]) -> None:
    found = built(specs)
    groups = connected(found)
    covered = [cells(segments.intervals) for segments, _ in groups]
    for i, own in enumerate(covered):
        assert not any(own & other for other in covered[i + 1 :])
    assert sorted(id(piece) for _, members in groups for piece in members) == sorted(map(id, found))
    for (_, members), own in zip(groups, covered, strict=True):
        assert own == set().union(*(cells(piece.segments) for piece in members))
        reached = cells(members[0].segments)
        for _ in members:
            for piece in members:
                if reached & cells(piece.segments):
                    reached |= cells(piece.segments)
        assert reached == own  # every member is linked to the first through others


@fast
@given(pieces())
def test_connected_groups_rebuild_the_rows(specs: list[Spec]) -> None:
    found = built(specs)
    out = torch.zeros(2, 4, TOTAL, dtype=torch.float64)
    for segments, members in connected(found):
        local = assemble([piece.moved(segments) for piece in members], segments.size, slice(0, 4))
        segments.scatter(local, out)
    close(out, spelled_out(found, TOTAL))


@fast
@given(pieces(), st.sets(st.integers(1, TOTAL - 1), max_size=4), st.booleans())
def test_routed_pieces_rebuild_the_rows_for_any_division_into_places(
    specs: list[Spec], cuts: set[int], interleaved: bool
) -> None:
    found = built(specs)
    edges = [0, *sorted(cuts), TOTAL]
    parts = list(itertools.pairwise(edges))
    places = [Segments((part,)) for part in parts]
    if interleaved:  # two places whose intervals alternate
        places = [Segments(tuple(parts[k::2])) for k in range(2) if parts[k::2]]
    out = torch.zeros(2, 4, TOTAL, dtype=torch.float64)
    routes = Places(places)
    for piece in found:
        for i, local in routes.route(piece):
            rows = torch.zeros(2, 4, places[i].size, dtype=torch.float64)
            local.add_to(rows, slice(0, 4))
            spread = torch.zeros_like(out)
            places[i].scatter(rows, spread)
            out += spread
    close(out, spelled_out(found, TOTAL))


def test_a_piece_that_fits_a_place_keeps_its_form() -> None:
    """A weight with its bias in one block stays an outer product; in two blocks the bias goes its own way."""
    layout = MatrixLayout(0, (3, 2), (0, 1), 1, 3, 2, bias=10)
    piece = outer(layout, generator(), 3)
    [(place, kept)] = Places([Segments(((6, 10),)), Segments(((0, 6), (10, 13)))]).route(piece)
    assert place == 1
    assert isinstance(kept, OuterRows)
    assert kept.layout.bias == 6
    apart = Places([Segments(((0, 6),)), Segments(((6, 13),))]).route(piece)
    assert [type(part) for _, part in apart] == [OuterRows, DenseRows]


@given(st.integers(0, 50), st.integers(0, 300), st.integers(0, 1000))
@fast
def test_chunks_cover_everything_once_within_the_budget(total: int, each: int, budget: int) -> None:
    found = list(chunks(total, each, budget))
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(total))
    assert all((part.stop - part.start) * each <= budget or part.stop - part.start == 1 for part in found)


def test_a_late_right_side_is_made_when_asked_for_and_again_once_forgotten() -> None:
    layout = MatrixLayout(0, (1, 2, 3), (0, 1, 2), 1, 2, 3)
    left, right = torch.randn(4, 5, 1, 1, 2, dtype=torch.float64), torch.randn(5, 1, 1, 3, dtype=torch.float64)
    made: list[int] = []

    def make() -> Tensor:
        made.append(1)
        return right

    late = OuterRows.late(layout, left, make)
    assert late.shape == (4, 5)
    assert not made
    plain = OuterRows(layout, left, right)
    torch.testing.assert_close(assemble([late], 6, slice(0, 5)), assemble([plain], 6, slice(0, 5)), rtol=0, atol=0)
    assert late.right is right
    assert len(made) == 1
    late.forget()
    assert late.of_cotangent(2).shape == (1, 5)
    assert len(made) == 2
    plain.forget()
    assert plain.right is right
    with pytest.raises(AttributeError, match="no attribute 'wrong'"):
        late.wrong  # type: ignore[attr-defined]  # noqa: B018


@fast
@given(layouts(), st.integers(1, 4), st.booleans(), st.sampled_from(["expanded", "equal", "uneven"]))
def test_squares_under_one_number_are_those_of_rows_spelled_out(spec: Spec, shared: int, same: bool, kind: str) -> None:
    """By products of positions where these are few, for all data points at once or cotangents that they share."""
    layout, g = MatrixLayout(*spec), generator()
    left = normal(g, 2, 1 if same else 3, shared, layout.groups, layout.rows)
    left = left.expand(-1, 3, -1, -1, -1)
    rows = OuterRows(layout, left, normal(g, 3, shared, layout.groups, layout.width))
    size = end(layout)
    precision = torch.tensor(0.3, dtype=torch.float64).expand(size)
    if kind != "expanded":
        precision = precision.clone()
    if kind == "uneven":
        precision[layout.segments[0][0]] = 0.7
    dense = assemble([rows], size, slice(0, 3)).transpose(0, 1)
    expected = (dense / precision) @ dense.mT
    found = DiagonalPrecision(precision)
    close(found.quadratic([rows]), expected)
    close(found.squares([rows]), expected.diagonal(dim1=1, dim2=2))


def test_squares_under_one_number_need_no_rows_where_positions_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in float32 rows are formed: positions that cancel would leave the rounding of what they cancel."""
    layout, g = MatrixLayout(0, (40, 30), (0, 1), 1, 40, 30), generator()
    left, right = normal(g, 2, 3, 4, 1, 40), normal(g, 3, 4, 1, 30)
    precision = DiagonalPrecision(torch.tensor(2.0, dtype=torch.float64).expand(layout.rows * layout.cols))
    expected = precision.squares([OuterRows(layout, left, right)])
    formed = DiagonalPrecision(torch.tensor(2.0).expand(precision.size)).squares(
        [OuterRows(layout, left.float(), right.float())]
    )
    torch.testing.assert_close(formed.double(), expected, rtol=1e-5, atol=0.0)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("rows were formed")

    monkeypatch.setattr("lapwing.linalg.rows.contract", never)
    close(precision.squares([OuterRows(layout, left, right)]), expected)
    precision.quadratic([OuterRows(layout, left, right)])
    with pytest.raises(AssertionError, match="rows were formed"):
        DiagonalPrecision(torch.tensor(2.0).expand(precision.size)).squares(
            [OuterRows(layout, left.float(), right.float())]
        )


def test_a_number_that_requires_gradients_has_them_through_squares() -> None:
    layout, g = MatrixLayout(0, (5, 6), (0, 1), 1, 5, 6), generator()
    rows = OuterRows(layout, normal(g, 2, 3, 2, 1, 5), normal(g, 3, 2, 1, 6))
    delta = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    value = DiagonalPrecision(delta.expand(30)).squares([rows]).sum()
    (slope,) = torch.autograd.grad(value, delta)
    close(slope, -value.detach() / 0.4)
    each = torch.full((30,), 0.4, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(DiagonalPrecision(each).squares([rows]).sum(), each)
    close(slopes.sum(), slope)
    assert bool((slopes < 0).all())


@fast
@given(layouts(), st.integers(2, 4), st.sampled_from([1, 300, 10**9]))
def test_squares_of_rows_in_tiles_are_those_of_rows_spelled_out(spec: Spec, shared: int, cache: int) -> None:
    """Tiles of a part of the matrix, of one data point or of several."""
    layout, g = MatrixLayout(*spec), generator()
    rows, size = outer(layout, g, shared), end(layout)
    weight = 0.1 + torch.rand(size, dtype=torch.float64, generator=g)
    dense = assemble([rows], size, slice(0, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lapwing.linalg.rows.CACHE", cache)
        assert rows.large == (cache < 10**9)
        close(DiagonalPrecision(1 / weight).squares([rows]), (dense.square() @ weight).mT)
        squares = torch.zeros(size, dtype=torch.float64)
        rows.add_squares_to(squares, 10**9)
    close(squares, dense.square().sum((0, 1)))


def test_squares_in_tiles_are_differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, g = MatrixLayout(0, (3, 2), (0, 1), 1, 3, 2), generator()
    monkeypatch.setattr("lapwing.linalg.rows.CACHE", 1)
    left, right, weight = normal(g, 2, 3, 2, 1, 3), normal(g, 3, 2, 1, 2), torch.rand(6, generator=g).double() + 1
    for each in (left, right, weight):
        each.requires_grad_()
    torch.autograd.gradcheck(
        lambda a, b, w: DiagonalPrecision(w).squares([OuterRows(layout, a, b)]), (left, right, weight)
    )
