"""What parity tests share: both runners with every number in float32, and how far two implementations may be apart."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.core.ports import Runner
from octavo.models.load import OpenedModel
from octavo.models.weights import WeightSource
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.testing.scored_text import num_blocks_for

BLOCK_SIZE = 16


def tolerance(wanted: NDArray[np.float32]) -> float:
    """Return how much two orders of the same sums may differ."""
    return 1e-4 * max(1.0, float(np.abs(wanted).max()))


def exact_runner(name: Literal["reference", "native"], model: OpenedModel, max_tokens: int) -> Runner:
    """Return a runner for texts of up to `max_tokens` tokens, one at a time.

    Raises:
        ImportError: the native module is not built.
    """
    num_blocks = num_blocks_for(model.spec, max_tokens, BLOCK_SIZE)
    if name == "reference":
        with WeightSource(model) as source:
            weights = {tensor.name: tensor.to_f32() for tensor in source.read_all()}
        return ReferenceRunner(
            model.spec, model.program, weights, num_blocks=num_blocks, block_size=BLOCK_SIZE, poison=True
        )
    from octavo.runtime.native_runner import NativeRunner  # noqa: PLC0415 - needs the native module
    from octavo.runtime.native_weights import pack_weights  # noqa: PLC0415

    with WeightSource(model) as source:
        packed = pack_weights(source.read_all(), model.program, weight_dtype="f32")
    return NativeRunner(
        model.spec,
        model.program,
        packed,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_cache_dtype="f32",
        threads=2,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=1,
        poison=True,
    )
