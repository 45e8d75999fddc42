"""An explanation as callers get it: with the two tokens of a near miss as text, for those who may see prompts."""

from __future__ import annotations

from typing import Any

from octavo.engine.explain import Explanation
from octavo.runtime.tokenizer import Tokenizer


def explain_document(found: Explanation, tokenizer: Tokenizer, *, shows_prompts: bool) -> dict[str, Any]:
    """Return the document `octavo.explain/1`; with prompts shown, a near miss has `text` and `cached_text`, too."""
    document = found.as_dict(shows_tokens=shows_prompts)
    near_miss = document["near_miss"]
    if shows_prompts and near_miss is not None:
        near_miss["text"] = tokenizer.decode([near_miss["token_id"]], skip_special_tokens=False)
        near_miss["cached_text"] = tokenizer.decode([near_miss["cached_token_id"]], skip_special_tokens=False)
    return document
