"""Bytes of weights, KV cache, activations and the process around them, counted from the model's sizes alone.

    bytes per token = 2 (K and V) x kv_heads x (head_dim x bytes per element + bytes of a scale where quantised),
                      summed over the layers that keep KV

Layers with the same KV behaviour form groups of equal size (`ModelSpec.kv_groups`); a block holds `block_size` tokens
of all layers of *one* group, and a request has a block table per group. Nothing here reads a file or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.config.engine import KVDtype
from octavo.models.arena import lay_out
from octavo.models.held_kinds import held_bytes
from octavo.models.kv_record import kv_record, layer_dtypes, row_bytes
from octavo.models.program import Program, WeightName
from octavo.models.sparse import bounds_bytes
from octavo.models.spec import KVGroup, ModelSpec
from octavo.models.tensor_entry import TensorEntry
from octavo.models.tensor_kinds import TensorKind
from octavo.planner.block_counts import full_blocks, longest_fitting, sliding_blocks
from octavo.units import MIB

LOGITS_TILE_ROWS = 64
"""Prompt tokens are scored (`prompt_logprobs`) in tiles of so many rows, so that logits never grow with the prompt."""

# Resident memory of a process beside weights, activations and KV cache, as measured with SmolLM2 (49,152 tokens): 78
# MiB from Python and 84 MiB from the command line, of which the tokenizer is 30 MiB. Interpreter, NumPy, template and
# terminal libraries, the kernels' scratch and the state of requests are the rest.
_BASE_OVERHEAD_BYTES = 50 * MIB
# A tokenizer keeps vocabulary and merges in hash maps; 0.3 to 0.9 KiB per entry were measured.
_TOKENIZER_BYTES_PER_ENTRY = 640


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What the KV cache of a model costs at one dtype and block size.

    Args:
        layers_per_group: Layers in a block record; the longest group's, since all groups draw from one pool.
        windows: For each group, the tokens a query sees (`None`: all).
        block_size: Tokens in a block.
        num_sinks: First tokens that groups with a window keep besides.
        token_layer_bytes: Bytes of one token's key and value in one layer, scales included.
        token_extra_bytes: Bytes that a record has more per token, because a quantised cache leaves layers in 16 bit.
    """

    layers_per_group: int
    windows: tuple[int | None, ...]
    block_size: int
    token_layer_bytes: int
    token_extra_bytes: int = 0
    num_sinks: int = 0

    @property
    def block_bytes(self) -> int:
        return self.block_size * (self.layers_per_group * self.token_layer_bytes + self.token_extra_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of the pool that one more token costs while no window is full, padding of records included."""
        return len(self.windows) * (self.layers_per_group * self.token_layer_bytes + self.token_extra_bytes)

    def without_windows(self) -> KVShape:
        """Return the same, for an allocator that keeps every token of every group."""
        return replace(self, windows=(None,) * len(self.windows))

    def blocks_for_tokens(self, num_tokens: int, *, max_num_batched_tokens: int) -> int:
        """Return the most blocks that one request of `num_tokens` holds at once, over all groups.

        A group with window w keeps the last w - 1 tokens beside those of the step in hand, and the run may begin in
        the middle of a block: at most `ceil((w - 1 + batched) / block_size) + 1` blocks, and those of the sinks.
        """
        whole = full_blocks(num_tokens, block_size=self.block_size)
        return sum(
            whole
            if window is None
            else min(
                whole,
                full_blocks(self.num_sinks, block_size=self.block_size)
                + sliding_blocks(
                    num_tokens,
                    window=window,
                    block_size=self.block_size,
                    max_num_batched_tokens=max_num_batched_tokens,
                ),
            )
            for window in self.windows
        )

    def longest_tokens(self, num_blocks: int, *, max_num_batched_tokens: int, limit: int) -> int:
        """Return the longest request, up to `limit` tokens, that so many blocks hold; 0 when none fits."""
        return longest_fitting(
            lambda num_tokens: self.blocks_for_tokens(num_tokens, max_num_batched_tokens=max_num_batched_tokens),
            num_blocks,
            step=self.block_size,
            limit=limit,
        )


def kv_shape(spec: ModelSpec, *, kv_dtype: KVDtype, block_size: int, skip_layers: Sequence[int] = ()) -> KVShape:
    """Return what the KV cache of a model costs, `skip_layers` staying in 16 bit."""
    groups = spec.kv_groups or (KVGroup(layers=tuple(range(spec.num_layers))),)
    layers_per_group = max(len(group.layers) for group in groups)
    token_layer_bytes = 2 * spec.num_kv_heads * row_bytes(kv_dtype, spec.head_dim)
    record = kv_record(spec, dtype=kv_dtype, block_size=block_size, skip_layers=skip_layers)
    return KVShape(
        layers_per_group=layers_per_group,
        windows=tuple(group.window for group in groups),
        num_sinks=max(group.num_sinks for group in groups),
        block_size=block_size,
        token_layer_bytes=token_layer_bytes,
        token_extra_bytes=record.block_bytes // block_size - layers_per_group * token_layer_bytes,
    )


def layer_token_bytes(
    spec: ModelSpec, *, kv_dtype: KVDtype, block_size: int, skip_layers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the bytes that one token leaves in each layer: scales and bounds included, padding of records not."""
    dtypes = layer_dtypes(spec.num_layers, kv_dtype, skip_layers)
    return tuple(
        2 * spec.num_kv_heads * row_bytes(dtype, spec.head_dim) + bounds_bytes(spec, layer, block_size) // block_size
        for layer, dtype in enumerate(dtypes)
    )


def activation_bytes(program: Program, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Return the size of the buffers that a runner allocates for its largest step."""
    return lay_out(
        program,
        num_token_rows=max_num_batched_tokens,
        num_selected_rows=max_selected_rows(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
    ).total_bytes


def max_selected_rows(*, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Return the most rows whose logits exist at once: one per running request, or a tile of scored prompt tokens."""
    return min(max_num_batched_tokens, max(max_num_seqs, LOGITS_TILE_ROWS))


def overhead_bytes(spec: ModelSpec) -> int:
    """Return what the process needs beside weights, activations and KV cache: interpreter, libraries, tokenizer."""
    return _BASE_OVERHEAD_BYTES + spec.vocab_size * _TOKENIZER_BYTES_PER_ENTRY


def weight_bytes(entries: Mapping[WeightName, TensorEntry], held_kind: Callable[[TensorEntry], TensorKind]) -> int:
    """Return the bytes of a model's tensors as they are held in memory.

    Args:
        entries: The tensors that the program uses by our names, each once (a tied head is one tensor).
        held_kind: The loader's choice of element type for a tensor.
    """
    return sum(held_bytes(name, entry.shape, held_kind(entry)) for name, entry in entries.items())
