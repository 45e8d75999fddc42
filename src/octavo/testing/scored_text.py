"""Log-probabilities of every token id after every token of a text, from one step of any runner.

Works for vocabularies of up to 1,024 ids, so for tiny models; rows are scored as `prompt_logprobs` are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.core.ports import Runner
from octavo.models.spec import ModelSpec
from octavo.testing.hand_plans import Chunk, make_plan


def num_blocks_for(spec: ModelSpec, num_tokens: int, block_size: int) -> int:
    """Return the usable blocks that `score_text` needs."""
    return len(spec.kv_groups) * -(-num_tokens // block_size)


def score_text(
    runner: Runner, spec: ModelSpec, token_ids: Sequence[int], *, block_size: int
) -> npt.NDArray[np.float32]:
    """Return `[num_tokens, vocab_size]`: row i follows token i.

    The whole text is one chunk; blocks 1 to `num_blocks_for(...)` are used.
    """
    per_group = -(-len(token_ids) // block_size)
    tables = [list(range(1 + group * per_group, 1 + (group + 1) * per_group)) for group in range(len(spec.kv_groups))]
    chunk = Chunk("only", token_ids, tables=tables, sample=None, targets=[0] * len(token_ids))
    new_blocks = [block for table in tables for block in table]
    plan = make_plan([chunk], new_blocks=new_blocks, num_top=spec.vocab_size)
    rows = np.empty((len(token_ids), spec.vocab_size), np.float32)
    for row, scored in enumerate(runner.execute(plan).prompt_logprobs[0]):
        assert len(scored.top) == spec.vocab_size, "every id is scored"
        for token_id, logprob in scored.top:
            rows[row, token_id] = logprob
    return rows
