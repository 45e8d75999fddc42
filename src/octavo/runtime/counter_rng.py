"""Random numbers without state: each is a function of (seed, position) alone.

A draw cannot depend on what else runs, on how often it is repeated, or on the order of steps.
"""

from __future__ import annotations

_MASK = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
_NUM_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a seed and a position: a multiple of 2^-53.

    Philox4x32-10 with the seed (as 64-bit two's complement, low word first) as key and `(position, 0, 0, 0)` as
    counter; its first two words, low word first, make a 64-bit number of which the upper 53 bits are used. Seeds that
    differ by 1 give unrelated numbers, as `n` answers with `seed + i` need.
    """
    assert 0 <= position <= _MASK, "a position is a 32-bit number"
    low, high, _, _ = philox4x32((position, 0, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Encrypt a counter: four 32-bit words from four, under a key of two.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = product_2 >> 32 ^ c1 ^ k0, product_2 & _MASK, product_0 >> 32 ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = k0 + _KEY_STEPS[0] & _MASK, k1 + _KEY_STEPS[1] & _MASK
    return c0, c1, c2, c3
