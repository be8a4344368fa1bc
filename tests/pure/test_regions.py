"""`disjoint` against the enumeration of every byte address."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.oracles import addresses, meet
from pure.strategies import BUFFER_BYTES, boxes, dense_layouts, flat_regions, strided_regions
from torch_nimble.regions import Region, disjoint


def contiguous(offset: int, *sizes: int, itemsize: int = 4, buffer: str = "a") -> Region:
    strides: list[int] = []
    step = itemsize
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return Region(buffer, offset, sizes, tuple(strides), itemsize)


def channels_last(batch: int, height: int, width: int, of: int, start: int, stop: int) -> Region:
    """Channels start:stop of a channels-last tensor (batch, of, height, width) of floats."""
    strides = tuple(4 * s for s in (height * width * of, 1, width * of, of))
    return Region("a", 4 * start, (batch, stop - start, height, width), strides, 4)


# -------------------------------------------------------------------- properties


@settings(max_examples=600)
@given(strided_regions(), strided_regions())
def test_regions_called_disjoint_share_no_byte(a: Region, b: Region) -> None:
    if disjoint(a, b):
        assert not meet(a, b)


@settings(max_examples=200)
@given(strided_regions(least_stride=-8), strided_regions(least_stride=-8))
def test_regions_with_negative_strides_called_disjoint_share_no_byte(a: Region, b: Region) -> None:
    if disjoint(a, b):
        assert not meet(a, b)


@given(strided_regions(), strided_regions())
def test_disjoint_is_symmetric(a: Region, b: Region) -> None:
    assert disjoint(a, b) == disjoint(b, a)


@settings(max_examples=500)
@given(st.data())
def test_boxes_of_one_dense_layout_are_told_apart_exactly(data: st.DataObject) -> None:
    layout = data.draw(dense_layouts())
    a, b = data.draw(boxes(layout)), data.draw(boxes(layout))
    assert disjoint(a, b) == (not meet(a, b))


@settings(max_examples=300)
@given(flat_regions(), flat_regions())
def test_aligned_contiguous_and_whole_regions_are_told_apart_exactly(a: Region, b: Region) -> None:
    assert disjoint(a, b) == (not meet(a, b, BUFFER_BYTES))


@given(strided_regions())
def test_a_region_is_disjoint_from_itself_only_if_empty(region: Region) -> None:
    assert disjoint(region, region) == region.is_empty


@given(strided_regions())
def test_a_region_is_empty_exactly_if_it_has_no_address(region: Region) -> None:
    assert region.is_empty == (not addresses(region, 0))


@given(strided_regions(), strided_regions())
def test_regions_of_different_buffers_are_disjoint(a: Region, b: Region) -> None:
    other = Region("b", b.offset, b.sizes, b.strides, b.itemsize)
    assert disjoint(a, other)
    assert disjoint(Region("a"), other)


@given(strided_regions())
def test_a_whole_buffer_meets_every_region_that_is_not_empty(region: Region) -> None:
    assert disjoint(Region("a"), region) == region.is_empty
    assert disjoint(region, Region("a")) == region.is_empty


# -------------------------------------------------------------------- named cases


@pytest.mark.parametrize("batch", [1, 3])
def test_channel_slices_of_a_channels_last_cat_are_disjoint(batch: int) -> None:
    cuts = [(0, 3), (3, 4), (4, 9)]
    slices = [channels_last(batch, 5, 7, 9, start, stop) for start, stop in cuts]
    for i, a in enumerate(slices):
        for j, b in enumerate(slices):
            assert disjoint(a, b) == (i != j)


def test_channel_slices_of_a_channels_last_cat_that_share_a_channel_meet() -> None:
    assert not disjoint(channels_last(2, 5, 7, 9, 0, 4), channels_last(2, 5, 7, 9, 3, 9))


def test_all_but_the_last_and_all_but_the_first_column_meet() -> None:
    left = Region("a", 0, (3, 4), (20, 4), 4)
    right = Region("a", 4, (3, 4), (20, 4), 4)
    assert meet(left, right)
    assert not disjoint(left, right)


def test_left_and_right_halves_of_the_columns_are_disjoint() -> None:
    assert disjoint(Region("a", 0, (3, 2), (16, 4), 4), Region("a", 8, (3, 2), (16, 4), 4))


def test_even_and_odd_items_are_disjoint() -> None:
    assert disjoint(Region("a", 0, (5,), (8,), 4), Region("a", 4, (5,), (8,), 4))


def test_neighbouring_ranges_are_disjoint_and_touching_ones_are_not() -> None:
    assert disjoint(contiguous(0, 8), contiguous(32, 8))
    assert not disjoint(contiguous(0, 8), contiguous(31, 8))


def test_an_item_wider_than_the_gap_is_seen() -> None:
    assert not disjoint(Region("a", 0, (4,), (8,), 5), Region("a", 4, (4,), (8,), 4))


def test_rows_that_overlap_each_other_are_not_called_disjoint() -> None:
    """A sliding window, as `unfold` makes it: stride smaller than the row."""
    windows = Region("a", 0, (4, 3), (4, 4), 4)
    assert not disjoint(windows, contiguous(20, 1))
    assert disjoint(windows, contiguous(24, 1))


def test_an_expanded_region_touches_only_what_it_expands() -> None:
    expanded = Region("a", 8, (1000, 2), (0, 4), 4)
    assert disjoint(expanded, contiguous(0, 2))
    assert disjoint(expanded, contiguous(16, 2))
    assert not disjoint(expanded, contiguous(12, 1))


def test_a_scalar_is_one_item() -> None:
    scalar = Region("a", 4, (), (), 4)
    assert not disjoint(scalar, contiguous(0, 2))
    assert disjoint(scalar, contiguous(8, 2))


def test_empty_regions_are_disjoint_from_everything() -> None:
    empty = Region("a", 0, (3, 0), (4, 4), 4)
    assert disjoint(empty, Region("a"))
    assert disjoint(empty, empty)
    assert disjoint(contiguous(0, 8), empty)


def test_whole_buffers_meet_only_in_the_same_buffer() -> None:
    assert not disjoint(Region("a"), Region("a"))
    assert disjoint(Region("a"), Region("b"))
