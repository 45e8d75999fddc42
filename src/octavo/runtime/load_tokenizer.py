"""From an opened model to its tokenizer, wherever the model keeps it."""

from __future__ import annotations

from octavo.models.load import OpenedModel
from octavo.runtime.folder_tokenizer import tokenizer_from_folder
from octavo.runtime.gguf_tokenizer import tokenizer_from_gguf
from octavo.runtime.tokenizer import Tokenizer


def load_tokenizer(model: OpenedModel) -> Tokenizer:
    """Build the tokenizer of a model.

    Its `vocab_size` is at least the model's: an id that the output layer has and the tokenizer lacks spells nothing.

    Raises:
        UnsupportedModelError: a tokenizer that we cannot read.
        ModelFileError: a tokenizer file or field is missing or broken.
    """
    if model.tokenizer_folder is not None:
        return tokenizer_from_folder(model.tokenizer_folder, vocab_size=model.spec.vocab_size)
    return tokenizer_from_gguf(model.gguf_metadata, str(model.path), vocab_size=model.spec.vocab_size)
