"""Layouts of the KV pool by hand: what a token, a block and a request cost on one device."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.models.catalogue import find_model
from octavo.models.shape import Layer, LayerKV, LayerState, ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.engine_version import EngineVersion
from octavo.planner.kv_arithmetic import kv_layout, pipeline_stages
from octavo.planner.kv_format import kv_format

KIB = 1024
FULL = Layer(kv=LayerKV(kind="full", num_kv_heads=8, key_dim=128, value_dim=128))
V0, V1, NEW = EngineVersion(0, 6), EngineVersion(0, 19), EngineVersion(0, 21)


def shape_of(name: str) -> ModelShape:
    return shape_from_hf(find_model(name).config, where=name, name=name)


def model(*layers: Layer, num_heads: int = 32) -> ModelShape:
    return ModelShape(
        name="test",
        architecture="test",
        dtype="bfloat16",
        hidden_size=64,
        num_heads=num_heads,
        vocab_size=100,
        max_position=4096,
        layers=layers,
        tensors=(),
    )


def sliding(window: int, heads: int = 8, dim: int = 128) -> Layer:
    return Layer(kv=LayerKV(kind="sliding", num_kv_heads=heads, key_dim=dim, value_dim=dim, window=window))


@pytest.mark.parametrize(
    ("name", "token_kib"),
    [
        ("llama-3-8b", 128),  # 2 x 32 layers x 8 heads x 128 x 2 B
        ("llama-3-70b", 320),  # 2 x 80 x 8 x 128 x 2 B
        ("gpt-3", 4608),  # 2 x 96 x 96 x 128 x 2 B
        ("falcon-7b", 8),  # 2 x 32 x 1 x 64 x 2 B
    ],
)
def test_token_costs_keys_and_values_of_all_kept_heads(name, token_kib):
    for engine in ("octavo", "vllm", "sglang"):
        assert kv_layout(shape_of(name), engine=engine, kv_dtype="bf16").token_bytes == token_kib * KIB


@pytest.mark.parametrize(
    ("engine", "dtype", "head_bytes"),
    [
        ("octavo", "f32", 512),
        ("octavo", "f16", 256),
        ("octavo", "int8", 128 + 2),  # a 16-bit scale for each token's head
        ("octavo", "fp8_e4m3", 128 + 2),
        ("octavo", "fp8", 128 + 2),
        ("octavo", "int4", 64 + 2),
        ("vllm", "auto", 256),
        ("vllm", "fp8", 128),  # one scale for a whole tensor
        ("vllm", "fp8_e5m2", 128),
        ("sglang", "bfloat16", 256),
    ],
)
def test_dtype_decides_the_bytes_of_a_head_and_its_scale(engine, dtype, head_bytes):
    layout = kv_layout(model(FULL, FULL), engine=engine, kv_dtype=dtype)

    assert layout.token_bytes == 2 * 8 * 2 * head_bytes


@pytest.mark.parametrize(
    ("engine", "dtype"), [("octavo", "fp8_e5m2"), ("octavo", "int2"), ("vllm", "int4"), ("sglang", "int8")]
)
def test_dtype_that_an_engine_lacks_is_refused_with_those_it_has(engine, dtype):
    with pytest.raises(InvalidParameterError, match="is not a KV dtype") as caught:
        kv_format(engine, dtype)

    assert "f16" in caught.value.because


def test_other_engines_keep_a_float32_model_in_16_bits_and_octavo_keeps_its_dtype():
    wide = replace(model(FULL), dtype="float32")

    assert kv_layout(wide, engine="vllm").token_bytes == 8 * 2 * 128 * 2
    assert kv_layout(wide, engine="octavo").token_bytes == 8 * 2 * 128 * 4


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)])
def test_more_ranks_than_heads_hold_copies(ranks, heads):
    layout = kv_layout(model(FULL, num_heads=64), engine="vllm", tensor_parallel_size=ranks)

    assert layout.token_bytes == heads * 2 * 128 * 2


def test_latent_vector_is_whole_on_every_rank():
    shape = shape_of("deepseek-v3")

    alone, together = (kv_layout(shape, engine="vllm", tensor_parallel_size=ranks) for ranks in (1, 8))

    assert alone.token_bytes == together.token_bytes == 61 * (512 + 64) * 2


def test_ranks_that_share_a_sequence_divide_the_latent_vectors_by_tokens():
    layout = kv_layout(shape_of("kimi-k2"), engine="vllm", version=V1, decode_context_parallel_size=8)

    assert layout.token_bytes == 61 * (512 + 64) * 2 // 8
    assert layout.logged_tokens(1000) == 1000 * 16 * 8
    assert layout.blocks_for(16 * 8 + 1) == 2
    assert layout.longest(2, 10_000) == 2 * 16 * 8


def test_early_vllm_cached_latent_layers_as_full_heads():
    """2 x 60 layers x 128 heads / 8 ranks x 256 (192 padded) x 2 B: vllm-project/vllm#4650."""
    layout = kv_layout(
        shape_of("DeepSeek-Coder-V2-Instruct"), engine="vllm", version=EngineVersion(0, 5, 3), tensor_parallel_size=8
    )

    assert layout.token_bytes == 983_040


def test_indexer_and_its_packed_layout_are_counted():
    shape = shape_of("deepseek-v3.2")

    wide, packed = (kv_layout(shape, engine="vllm", kv_dtype=dtype).token_bytes for dtype in ("auto", "fp8"))

    assert wide == 61 * (2 * 576 + 132)
    assert packed == 61 * (512 + 4 * 4 + 2 * 64 + 132)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (32, 1, [32]),
        (32, 4, [8, 8, 8, 8]),
        (61, 4, [15, 15, 16, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (7, 2, [4, 3]),
    ],
)
def test_layers_are_cut_into_stages_as_even_as_they_go(layers, stages, counts):
    cut = pipeline_stages(layers, stages)

    assert [len(stage) for stage in cut] == counts
    assert [layer for stage in cut for layer in stage] == list(range(layers))


def test_stage_with_the_most_to_keep_limits_them_all():
    shape = shape_of("deepseek-v3")

    assert kv_layout(shape, engine="vllm", pipeline_parallel_size=4).token_bytes == 16 * 576 * 2


def test_groups_have_as_many_layers_as_the_rarer_kind():
    """Gemma 3 27B: 10 full and 52 sliding layers are 1 + 6 groups of 10, the last with 2 of them."""
    layout = kv_layout(shape_of("gemma-3-27b"), engine="vllm", version=V1)

    assert [group.num_layers for group in layout.groups if group.kind == "full"] == [10]
    assert [group.num_layers for group in layout.groups if group.kind == "sliding"] == [10, 10, 10, 10, 10, 2]
    assert layout.block_bytes == 10 * 16 * 2 * 16 * 128 * 2
    assert layout.token_bytes == 62 * 2 * 16 * 128 * 2
    assert layout.padded_token_bytes == layout.logged_token_bytes() == 70 * 2 * 16 * 128 * 2


def test_request_holds_blocks_of_every_group_as_its_kind_keeps_them():
    """Of 100,000 tokens in steps of 8,192: full ceil(L/16); window 1,024: ceil((1,023 + 8,192)/16) + 1."""
    layout = kv_layout(shape_of("gemma-3-27b"), engine="vllm", version=V1, max_num_batched_tokens=8192)
    chunked = kv_layout(shape_of("llama-4-scout-17b-16e"), engine="vllm", version=V1, max_num_batched_tokens=8192)

    assert layout.blocks_for(100_000) == 6250 + 6 * (576 + 1)
    assert layout.blocks_for(1000) == 63 + 6 * (63 + 1)
    # 12 full, 36 in chunks of 8,192: 1 + 3 groups of 12.
    assert chunked.blocks_for(100_000) == 6250 + 3 * 1024
    assert layout.blocks_reserved(1000) == 7 * 63
    assert layout.blocks_shared(1000) == 62


def test_window_counts_the_query_itself_and_one_block_more_for_where_it_begins():
    """64 tokens before the query and 64 of a step are 8 blocks; from the middle of a block on, they touch 9."""
    layouts = {
        window: kv_layout(model(sliding(window)), engine="octavo", max_num_batched_tokens=64) for window in (65, 66)
    }

    assert layouts[65].blocks_for(10_000) == 8 + 1
    assert layouts[66].blocks_for(10_000) == 9 + 1
    assert layouts[65].blocks_for(8 * 16) == 8


def test_kinds_of_nearly_equal_number_are_one_padded_group_each():
    layout = kv_layout(model(*[FULL] * 4, *[sliding(64)] * 5), engine="vllm", version=V1)

    assert [(group.kind, group.num_layers) for group in layout.groups] == [("full", 4), ("sliding", 5)]
    assert layout.block_bytes == 5 * 16 * 4 * KIB


def test_layers_that_keep_less_have_more_tokens_in_a_block():
    """Gemma 4: full layers keep 2 x 512 elements, twice as keys and values; sliding ones 8 x 256, so half as many."""
    layout = kv_layout(shape_of("gemma-4-26b"), engine="vllm", version=V1)

    sizes = {group.kind: group.block_size for group in layout.groups}
    assert sizes == {"sliding": 16, "full": 32}
    assert layout.block_bytes == 5 * 16 * 2 * 8 * 256 * 2


def test_layers_whose_bytes_do_not_divide_are_refused():
    odd = Layer(kv=LayerKV(kind="full", num_kv_heads=3, key_dim=128, value_dim=128))

    with pytest.raises(UnsupportedModelError, match="cannot share blocks"):
        kv_layout(model(FULL, sliding(64), odd), engine="vllm", version=V1)


def test_first_engine_of_vllm_and_sglang_charge_all_layers_for_all_tokens():
    shape = shape_of("gemma-3-27b")

    for layout in (kv_layout(shape, engine="vllm", version=V0), kv_layout(shape, engine="sglang")):
        assert len(layout.groups) == 1
        assert layout.token_bytes == layout.logged_token_bytes() == 62 * 2 * 16 * 128 * 2
        assert layout.blocks_for(16_000) == 16_000 // layout.block_size


def test_state_is_padded_to_a_block_of_attention_and_held_twice_where_prefixes_are_cached():
    """Qwen3.5 35B: 1,024 B a token and layer in 8 bits; state 49,152 + 4 x 524,288 B: 2,096 tokens hold it."""
    shape = shape_of("qwen3.5-35b-a3b")
    for caching, version, states in ((True, V1, 2), (False, V1, 1), (True, EngineVersion(0, 11), 1)):
        layout = kv_layout(shape, engine="vllm", version=version, kv_dtype="fp8", is_caching=caching)

        assert layout.block_size == 2096
        assert layout.block_bytes == 10 * 2096 * 1024
        assert layout.blocks_for(10 * 2096) == 10 + 3 * states
        assert layout.state_bytes == 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)


def test_engines_without_groups_count_tokens_of_attention_alone():
    """Jamba: 4 layers of 8 heads of 128; vLLM's first engine kept its states outside of the pool."""
    shape = shape_of("jamba")
    old, other = kv_layout(shape, engine="vllm", version=V0), kv_layout(shape, engine="sglang")

    assert old.token_bytes == other.token_bytes == 4 * 2 * 8 * 128 * 2
    assert old.blocks_for(1600) == 100
    assert (old.logged_tokens(1000), other.logged_tokens(1000)) == (16_000, 1000)
    state = 28 * (8192 * 3 * 2 + 8192 * 16 * 2)
    assert other.state_bytes == state
    assert other.blocks_for(1600) == 1600 + ceil(state / other.token_bytes)


def test_layers_that_keep_nothing_cost_nothing():
    """Nemotron-H 56B: 10 layers of attention and 54 of Mamba 2 among 54 that are an MLP alone."""
    layout = kv_layout(shape_of("nemotron-h-56b"), engine="vllm", version=V1)

    assert layout.token_bytes == 10 * 2 * 8 * 128 * 2
    assert sum(group.num_layers for group in layout.groups) == 10 + 54


def test_model_without_attention_has_no_pool_to_plan():
    state = Layer(state=LayerState(conv_elements=8, recurrent_elements=64))

    with pytest.raises(UnsupportedModelError, match="without attention"):
        kv_layout(model(state, state), engine="vllm")


def test_token_line_of_newer_releases_follows_the_length():
    shape = shape_of("gpt-oss-20b")
    old, new = (kv_layout(shape, engine="vllm", version=version) for version in (V1, NEW))

    assert old.logged_tokens(1000) == old.logged_tokens(1000, 65_536) == 1000 // 2 * 16
    assert new.logged_tokens(1000, 65_536) > new.logged_tokens(1000, 8_192)
    assert new.logged_tokens(1000, 65_536) == int(1000 / new.blocks_for(65_536) * 65_536)
    assert new.logged_token_bytes(65_536) == new.request_token_bytes(65_536)


def _windowed_layers():
    kinds = st.sampled_from([FULL, sliding(32), sliding(1000)])
    return st.lists(kinds, min_size=1, max_size=12)


@given(layers=_windowed_layers(), block_size=st.sampled_from([8, 16, 48]), num_tokens=st.integers(1, 5000))
def test_octavo_never_holds_more_blocks_than_tokens_need_and_vllm_at_most_one_more_a_group(
    layers, block_size, num_tokens
):
    shape = model(*layers)

    own, other = (
        kv_layout(shape, engine=engine, version=V1, block_size=block_size, max_num_batched_tokens=64)
        for engine in ("octavo", "vllm")
    )

    assert own.block_bytes == other.block_bytes
    assert own.blocks_for(num_tokens) <= own.blocks_reserved(num_tokens)
    assert own.blocks_for(num_tokens) <= other.blocks_for(num_tokens)
    assert other.blocks_for(num_tokens) <= own.blocks_for(num_tokens) + len(own.groups)


@given(layers=_windowed_layers(), num_blocks=st.integers(0, 500), limit=st.integers(1, 20_000))
def test_longest_length_fits_and_the_next_does_not(layers, num_blocks, limit):
    layout = kv_layout(model(*layers), engine="octavo", max_num_batched_tokens=64)

    longest = layout.longest(num_blocks, limit)

    assert longest == 0 or layout.blocks_for(longest) <= num_blocks
    assert longest == limit or layout.blocks_for(longest + 1) > num_blocks


@given(layers=_windowed_layers())
def test_a_token_costs_at_least_its_bytes_and_padding_is_less_than_a_group(layers):
    layout = kv_layout(model(*layers), engine="octavo")

    assert layout.token_bytes <= layout.padded_token_bytes
    assert layout.token_bytes == len(layers) * 8 * 2 * 128 * 2
    assert len(layout.groups) * layout.block_bytes >= ceil(layout.token_bytes * layout.block_size)
