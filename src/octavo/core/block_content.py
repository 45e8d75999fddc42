"""What a block holds, as token ids: for people who look at the pool. Nothing decides by it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from octavo.core.kv_cache import KVCache
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.request import Request, RequestStatus


def block_tokens(kv_cache: KVCache, requests: Iterable[Request], block_id: int) -> array[int]:
    """Return the ids of the tokens whose keys and values lie in a block; empty if it holds nothing that is known.

    Args:
        requests: Unfinished ones; a block is first looked for in the tables of those that run.
        block_id: From 1 to the number of usable blocks.
    Cost: one pass over all tables.
    """
    size = kv_cache.block_size
    for request in requests:
        if request.status is not RequestStatus.RUNNING:
            continue
        for table in kv_cache.tables(request):
            if block_id in table:
                start = table.index(block_id) * size
                return request.content.token_ids(start, max(start, min(start + size, request.num_computed_tokens)))
    key = kv_cache.pool.blocks[block_id].key if isinstance(kv_cache, PagedKVCache) else None
    return array("i", b"" if key is None else key.tokens)
