"""Element types of stored tensors: how many bytes a row takes, and which type may stand for which.

A kind is the lower-case name that GGUF tools print (`f16`, `q4_0`, `q6_k` ...). A quantised kind packs a fixed number
of neighbouring values of a row into a block with shared scales; rows are always whole blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from octavo.errors import ModelFileError

TensorKind = str


@dataclass(frozen=True, slots=True)
class KindLayout:
    """`block_size` values take `block_bytes` bytes."""

    block_size: int
    block_bytes: int


KIND_LAYOUTS: dict[TensorKind, KindLayout] = {
    "f32": KindLayout(1, 4),
    "f16": KindLayout(1, 2),
    "bf16": KindLayout(1, 2),
    "q4_0": KindLayout(32, 18),
    "q4_1": KindLayout(32, 20),
    "q5_0": KindLayout(32, 22),
    "q5_1": KindLayout(32, 24),
    "q8_0": KindLayout(32, 34),
    "q2_k": KindLayout(256, 84),
    "q3_k": KindLayout(256, 110),
    "q4_k": KindLayout(256, 144),
    "q5_k": KindLayout(256, 176),
    "q6_k": KindLayout(256, 210),
    "iq2_xxs": KindLayout(256, 66),
    "iq2_xs": KindLayout(256, 74),
    "iq2_s": KindLayout(256, 82),
    "iq3_xxs": KindLayout(256, 98),
    "iq3_s": KindLayout(256, 110),
    "iq1_s": KindLayout(256, 50),
    "iq1_m": KindLayout(256, 56),
    "iq4_nl": KindLayout(32, 18),
    "iq4_xs": KindLayout(256, 136),
    "tq1_0": KindLayout(256, 54),
    "tq2_0": KindLayout(256, 66),
    "mxfp4": KindLayout(32, 17),
    "nvfp4": KindLayout(64, 36),
}
"""Every kind that can be read."""

# Fallbacks, nearest first, for a kind that is not held as it is. Eight bits with one scale per 32 values resolve at
# least as finely as a kind that shares its scale over 32 values too; kinds with a scale per 16 values can hold two
# scales that differ by orders of magnitude inside 32, so they go to a float type. bf16 and f16 do not hold each
# other's values (range against precision); f32 holds everything.
_FINER_SCALES = ("f16", "f32")
_FALLBACKS: dict[TensorKind, tuple[TensorKind, ...]] = {
    "f32": (),
    "f16": ("f32",),
    "bf16": ("f32",),
    "q8_0": _FINER_SCALES,
    "q4_0": ("q8_0", *_FINER_SCALES),
    "q4_1": ("q8_0", *_FINER_SCALES),
    "q5_0": ("q8_0", *_FINER_SCALES),
    "q5_1": ("q8_0", *_FINER_SCALES),
    "q4_k": ("q8_0", *_FINER_SCALES),
    "q5_k": ("q8_0", *_FINER_SCALES),
    "iq4_nl": ("q8_0", *_FINER_SCALES),
    "iq4_xs": ("q8_0", *_FINER_SCALES),
    # Powers of two between 2^-127 and 2^127 as scales: beyond f16's range.
    "mxfp4": ("bf16", "f32"),
}


def row_bytes(kind: TensorKind, num_values: int, *, tensor: str) -> int:
    """Return the bytes of a row of `num_values` values.

    Raises:
        ModelFileError: the row is not a whole number of the kind's blocks.
    """
    layout = KIND_LAYOUTS[kind]
    if num_values % layout.block_size:
        raise ModelFileError(
            f"{tensor}: rows of {num_values} values cannot be {kind}",
            because=f"{kind} packs {layout.block_size} values a block",
        )
    return num_values // layout.block_size * layout.block_bytes


def nearest_kind(kind: TensorKind, held: Collection[TensorKind]) -> TensorKind:
    """Return the kind to hold a tensor in: its own if it is in `held`, else the nearest at least as precise.

    `held` are the kinds a runner has kernels for; it contains `f32`.
    """
    for candidate in (kind, *_FALLBACKS.get(kind, _FINER_SCALES)):
        if candidate in held:
            return candidate
    assert "f32" in held, "every runner holds f32"
    return "f32"
