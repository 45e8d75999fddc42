"""Which layers share block tables: layers with the same KV behaviour, cut into groups of equal size."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.spec import KVGroup

# If one behaviour has less than this many times the layers of the other, both become one padded group each.
_SIMILAR_COUNTS = 1.5


def make_kv_groups(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Cut layers into groups.

    All groups draw equal-sized blocks from one pool, so all have the same number of layers; the last group of a
    behaviour may have fewer, and its blocks are padded. 10 full and 52 windowed layers become 1 + 6 groups of 10.

    Args:
        windows: For each layer, the tokens a query sees, its own included; `None` means all.

    Source: the grouping vLLM logs for models of mixed layers (group size = layers of the rarer kind).
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = group_size([len(layers) for layers in by_window.values()])
    return tuple(
        KVGroup(layers=tuple(layers[start : start + size]), window=window)
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    )


def group_size(counts: Sequence[int]) -> int:
    """Return the layers of a group, from how many layers there are of each kind."""
    rarest, commonest = min(counts), max(counts)
    return commonest if commonest < _SIMILAR_COUNTS * rarest else rarest


def layer_windows(groups: Sequence[KVGroup]) -> tuple[int | None, ...]:
    """Return the window of each layer, the inverse of `make_kv_groups`."""
    windows = {layer: group.window for group in groups for layer in group.layers}
    return tuple(windows[layer] for layer in range(len(windows)))
