"""Matches the tensors a file has with those its model needs: all there, of the right shape, and nothing unknown.

An unknown tensor is refused, not skipped: a bias or a norm that nobody applies changes every answer without a trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from octavo.errors import ModelFileError
from octavo.models.names import canonical_names, gguf_name, hf_spelling, tensor_shapes
from octavo.models.spec import ModelSpec
from octavo.models.tensor_entry import TensorEntry

# Tables of rotary frequencies that some converters store; they follow from the configuration (a GGUF file's
# `rope_freqs.weight` is read with it).
_HF_HARMLESS = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
# GPT-2's files: the causal mask of each layer.
_GPT2_HARMLESS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")
_GPT2_FAMILY = ("gpt2", "gpt_bigcode")
_GGUF_HARMLESS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_INTERLEAVED = ("llama", "mixtral")
"""Families whose GGUF files keep rows of q and k in the order of interleaved rotary pairs."""
_NORMS_LESS_ONE = ("gemma2", "gemma3")
"""Families whose safetensors files keep norm weights less 1; GGUF files keep them whole."""
_NUM_NAMED = 3


def match_hf_tensors(
    spec: ModelSpec, found: Mapping[str, TensorEntry], where: Path
) -> tuple[dict[str, TensorEntry], TensorEntry | None]:
    """Return the tensors of safetensors files by our names, and the head that a tied model's file holds needlessly.

    Raises:
        ModelFileError: tensors are missing, misshapen or unknown.
    """
    spelling = hf_spelling(spec)
    if spec.architecture in _GPT2_FAMILY:
        found = {_with_prefix(name): entry for name, entry in found.items()}
    spare_head = found.get(spelling("lm_head")) if spec.tie_embeddings else None
    if spare_head is not None:
        found = {name: entry for name, entry in found.items() if entry is not spare_head}
    if spec.architecture == "gpt2":
        found = {name: _turned(name, entry) for name, entry in found.items()}
    harmless = _GPT2_HARMLESS if spec.architecture in _GPT2_FAMILY else _HF_HARMLESS
    tensors = _match(spec, found, spelling, harmless, where)
    if spec.architecture in _NORMS_LESS_ONE:
        tensors = {name: replace(entry, adds_one=name.endswith("norm")) for name, entry in tensors.items()}
    return tensors, spare_head


def match_gguf_tensors(spec: ModelSpec, found: Mapping[str, TensorEntry], where: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a GGUF file by our names, marking rows that must be put back in order.

    Raises:
        ModelFileError: tensors are missing, misshapen or unknown.
    """
    if spec.mixture is not None:
        found = _unstacked(found)
    tensors = _match(spec, found, gguf_name, _GGUF_HARMLESS, where)
    if spec.architecture not in _INTERLEAVED:
        return tensors
    num_heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    return {
        name: replace(entry, interleaved_heads=num_heads.get(name.rsplit(".", 1)[-1].removesuffix("_bias"), 0))
        for name, entry in tensors.items()
    }


def _with_prefix(name: str) -> str:
    """Spell a name as most files of GPT-2's family do; the oldest leave `transformer.` out."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _turned(name: str, entry: TensorEntry) -> TensorEntry:
    """GPT-2's products are stored as `[in_features, out_features]`."""
    is_product = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None and len(entry.shape) == 2
    return replace(entry, shape=entry.shape[::-1], is_transposed=True) if is_product else entry


def _unstacked(found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Cut `blk.0.ffn_up_exps.weight`, `[experts, rows, columns]`, into `blk.0.ffn_up_exps.3.weight` and so on."""
    entries: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        stem, _, suffix = name.rpartition(".")
        if not stem.endswith("_exps") or len(entry.shape) != 3:
            entries[name] = entry
            continue
        num_bytes = entry.num_bytes // entry.shape[0]
        for expert in range(entry.shape[0]):
            entries[f"{stem}.{expert}.{suffix}"] = replace(
                entry,
                shape=entry.shape[1:],
                offset_bytes=entry.offset_bytes + expert * num_bytes,
                num_bytes=num_bytes,
            )
    return entries


def _match(
    spec: ModelSpec,
    found: Mapping[str, TensorEntry],
    spelling: Callable[[str], str],
    harmless: re.Pattern[str],
    where: Path,
) -> dict[str, TensorEntry]:
    wanted = canonical_names(spec, spelling)
    _refuse_missing([name for name in wanted if name not in found], where)
    _refuse_unknown([name for name in found if name not in wanted and not harmless.fullmatch(name)], where)
    shapes = tensor_shapes(spec)
    for file_name, name in wanted.items():
        if found[file_name].shape != shapes[name]:
            raise ModelFileError(
                f"{found[file_name].path}: tensor {file_name!r} has shape {list(found[file_name].shape)}, "
                f"{list(shapes[name])} was expected",
                because="the model's configuration gives that shape",
            )
    return {name: found[file_name] for file_name, name in wanted.items()}


def _refuse_missing(names: list[str], where: Path) -> None:
    if names:
        raise ModelFileError(f"{where}: {_listed(names)} missing", because="the model's configuration asks for it")


def _refuse_unknown(names: list[str], where: Path) -> None:
    if names:
        raise ModelFileError(
            f"{where}: {_listed(names)} unknown", because="nothing in the model's configuration uses it"
        )


def _listed(names: list[str]) -> str:
    """Return `tensor 'a' is`, or `tensors 'a', 'b', 'c' and 4 more are`."""
    if len(names) == 1:
        return f"tensor {names[0]!r} is"
    more = f" and {len(names) - _NUM_NAMED:,} more" if len(names) > _NUM_NAMED else ""
    return f"tensors {', '.join(repr(name) for name in names[:_NUM_NAMED])}{more} are"
