"""Hypothesis strategies for the core: tiny pools, prompts that share prefixes, and everything a request may ask for.

Each is drawn in few choices, so that Hypothesis spends its time on the core: what a request asks for comes from a fixed
list, simplest first, which is also the order in which a failing example shrinks.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import hypothesis.strategies as st

from octavo.core.block_hash import chain_hash
from octavo.core.kv_cache import GroupSpec
from octavo.testing.factories import CoreSetup, constant_hash, four_bit_hash

VOCAB_SIZE = 5
"""Few tokens, so that answers run into each other's prefixes, stop ids come up and near misses are common."""

MAX_PROMPT_TOKENS = 48

Kind = Literal["full", "two full", "full+window", "window", "two windows", "sinks", "reserved"]


def group_layouts(kind: Kind) -> st.SearchStrategy[tuple[GroupSpec, ...]]:
    """Draw the KV groups of a kind; the reserved allocator takes any."""
    full = st.just(GroupSpec())
    window = st.builds(GroupSpec, window=st.integers(2, 20))
    sinks = st.builds(GroupSpec, window=st.integers(2, 20), num_sinks=st.integers(1, 9))
    layouts: dict[str, st.SearchStrategy[tuple[GroupSpec, ...]]] = {
        "full": st.tuples(full),
        "two full": st.tuples(full, full),
        "full+window": st.tuples(full, window),
        "window": st.tuples(window),
        "two windows": st.tuples(window, window),
        "sinks": st.tuples(sinks),
    }
    return st.one_of(*layouts.values()) if kind == "reserved" else layouts[kind]


def core_setups(kind: Kind) -> st.SearchStrategy[CoreSetup]:
    """Draw a scheduler over a pool of 24 to 96 tokens per group: a few requests fill it."""
    return group_layouts(kind).flatmap(lambda groups: _setups_over(groups, is_reserved=kind == "reserved"))


def _setups_over(groups: tuple[GroupSpec, ...], *, is_reserved: bool) -> st.SearchStrategy[CoreSetup]:
    def build(
        block_size: int,
        pool_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        num_spare_tokens: int,
        how: dict[str, Any],
    ) -> CoreSetup:
        # A reserved pool below one run refuses everything, which is soon tested.
        per_group = max(pool_tokens, max_model_len + block_size) if is_reserved else pool_tokens
        return CoreSetup(
            num_blocks=-(-per_group * len(groups) // block_size),
            block_size=block_size,
            groups=groups,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + num_spare_tokens,
            allocator="reserved" if is_reserved else "paged",
            vocab_size=VOCAB_SIZE,
            **how,
        )

    return st.builds(
        build,
        block_size=st.sampled_from([4, 1, 2, 16]),
        pool_tokens=st.integers(24, 96),
        max_model_len=st.sampled_from([64, 80, 48, 33, 24]),
        max_num_seqs=st.sampled_from([4, 6, 5, 3, 2, 1]),
        num_spare_tokens=st.sampled_from([30, 0, 1, 2, 3, 5, 8, 13]),
        how=st.fixed_dictionaries(
            {
                "is_caching": st.just(not is_reserved) if is_reserved else st.sampled_from([True, True, True, False]),
                "policy": st.sampled_from(["fcfs", "priority"]),
                "watermark_ratio": st.sampled_from([0.0, 0.0, 0.01, 0.3]),
                "hash_function": st.sampled_from([chain_hash, chain_hash, four_bit_hash, constant_hash]),
            }
        ),
    )


def prompts(max_tokens: int = MAX_PROMPT_TOKENS) -> st.SearchStrategy[list[int]]:
    """Draw a prompt from a small tree: one of three stems, cut somewhere, and a few tokens of its own."""
    return st.builds(
        lambda stem, num_shared, tail: [*_stem(stem)[:num_shared], *tail][:max_tokens] or [stem],
        st.integers(0, 2),
        st.integers(0, max_tokens),
        st.sampled_from(_TAILS),
    )


def requests() -> st.SearchStrategy[dict[str, Any]]:
    """Draw what `Rig.add_answers` is to ask for."""
    return st.sampled_from(_REQUESTS)


def _stem(number: int) -> list[int]:
    """Return 48 tokens; the three stems part after 7 and again after 14 tokens."""
    return [(position * position + number * (position // 7)) % VOCAB_SIZE for position in range(MAX_PROMPT_TOKENS)]


def _request(rng: random.Random) -> dict[str, Any]:
    how: dict[str, Any] = {"priority": rng.randrange(3), "seed": rng.randrange(4)}
    if rng.random() < 0.2:
        return how | {"n": rng.choice([1, 1, 3]), "max_tokens": rng.randrange(9), "prompt_logprobs": rng.randrange(3)}
    how |= {"n": rng.choice([1, 1, 1, 2, 4]), "temperature": rng.choice([0.0, 1.0])}
    how["max_tokens"] = rng.choice([None, 1, rng.randint(2, 9), rng.randint(2, 24), rng.randint(8, 32)])
    how["salt"] = rng.choice([None, None, None, "a", "b"])
    if how["max_tokens"] != 1 and rng.random() < 0.2:
        how["min_tokens"] = 2
    rare = {"stop_token_ids": (3,), "eos_token_ids": (4,), "ignore_eos": True, "presence_penalty": 0.5}
    return how | {name: value for name, value in rare.items() if rng.random() < 0.2}


_RNG = random.Random(1)
_TAILS = ([], *([_RNG.randrange(VOCAB_SIZE) for _ in range(_RNG.randint(1, 5))] for _ in range(30)))
_REQUESTS = ({"n": 1, "max_tokens": 4}, *sorted((_request(_RNG) for _ in range(200)), key=len))
