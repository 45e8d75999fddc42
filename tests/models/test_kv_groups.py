"""Cutting layers into groups that share block tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.models.kv_groups import layer_windows, make_kv_groups


def sizes(windows):
    return [(group.window, len(group.layers)) for group in make_kv_groups(windows)]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 30, [(None, 30)]),
        ([4096] * 32, [(4096, 32)]),
        ([None, 64] * 12, [(None, 12), (64, 12)]),
        # 52 = 5 x 10 + 2: the sixth windowed group is padded.
        ([64] * 5 + ([None] + [64] * 5) * 9 + [None, 64, 64], [(64, 10)] * 5 + [(64, 2), (None, 10)]),
        # 13 is less than 1.5 times 10: one padded group each rather than two.
        ([None] * 10 + [64] * 13, [(None, 10), (64, 13)]),
        ([None] * 21 + [64] * 7, [(None, 7)] * 3 + [(64, 7)]),
    ],
    ids=["full", "window", "half", "10 of 62", "similar", "qwen2"],
)
def test_groups_have_the_layers_of_the_rarer_kind(windows, expected):
    assert sizes(windows) == expected


@given(st.lists(st.sampled_from([None, 16, 512]), min_size=1, max_size=80))
def test_every_layer_is_in_one_group_with_its_own_window(windows):
    groups = make_kv_groups(windows)

    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert layer_windows(groups) == tuple(windows)
    by_window = {}
    for group in groups:
        by_window.setdefault(group.window, []).append(len(group.layers))
    for counts in by_window.values():
        assert all(count == counts[0] for count in counts[:-1])
        assert counts[-1] <= counts[0]
