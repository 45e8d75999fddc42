"""Packing: how published weights are quantised, to the byte: bits of an element, and what goes with a group of them.

Only matrices of linear layers are packed, and of them those that the scheme takes (`roles`); embeddings, norms, routers
and the head stay in the model's own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.tensor_kinds import KIND_LAYOUTS
from octavo.models.weight_tensor import TensorRole, WeightTensor
from octavo.units import cdiv, quote

_LAYER = re.compile(r"layers\.\d+\.")
_MOST_LAYERS = 10
_LINEAR_ROLES: tuple[TensorRole, ...] = ("attention", "mlp", "expert", "state", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One scheme.

    Args:
        name: As configs and tools call it.
        bits: Of an element.
        group_columns: Neighbouring columns of a row that share a scale; 0: the whole row.
        group_rows: Rows that share a scale as well; 0: all rows.
        scale_bytes: Of one scale.
        zero_bits: Of the zero point of a group; 0 where the scheme is symmetric.
        roles: What is packed.
        packs_all: Embeddings and the head are packed, too, as GGUF files do.
        excluded: Parts of names of layers that stay as they are.
    """

    name: str
    bits: float
    group_columns: int = 0
    group_rows: int = 1
    scale_bytes: int = 0
    zero_bits: int = 0
    roles: tuple[TensorRole, ...] = _LINEAR_ROLES
    packs_all: bool = False
    excluded: tuple[str, ...] = ()

    def packs(self, tensor: WeightTensor) -> bool:
        """Say whether a tensor is packed."""
        if self.packs_all:
            return tensor.rows > 1 and tensor.role in (*_LINEAR_ROLES, "embedding", "head", "router")
        if not tensor.is_linear or tensor.role not in self.roles:
            return False
        return not any(part in tensor.name for part in self.excluded)

    def matrix_bytes(self, rows: int, columns: int) -> float:
        """Return the bytes of one packed matrix with its scales and zero points."""
        num_groups = cdiv(columns, self.group_columns or columns) * cdiv(rows, self.group_rows or rows)
        return rows * columns * self.bits / 8 + num_groups * (self.scale_bytes + self.zero_bits / 8)


PACKINGS: Mapping[str, Packing] = {
    packing.name: packing
    for packing in (
        Packing(name="awq", bits=4, group_columns=128, scale_bytes=2, zero_bits=4),
        Packing(name="gptq", bits=4, group_columns=128, scale_bytes=2, zero_bits=4),
        Packing(name="w4a16", bits=4, group_columns=128, scale_bytes=2),
        Packing(name="w8a8", bits=8, scale_bytes=2),
        Packing(name="fp8", bits=8, scale_bytes=4),
        Packing(name="fp8-block", bits=8, group_columns=128, group_rows=128, scale_bytes=4),
        Packing(name="mxfp4", bits=4, group_columns=32, scale_bytes=1, roles=("expert",)),
        Packing(name="nvfp4", bits=4, group_columns=16, scale_bytes=1),
        Packing(name="bnb-nf4", bits=4, group_columns=64, scale_bytes=4),
    )
}
"""Schemes by the names that options take; a config's own says more (`packing_from_hf`)."""

_SAME = {
    "int4": "w4a16",
    "int8": "w8a8",
    "fp8_e4m3": "fp8",
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "bitsandbytes": "bnb-nf4",
}


def named_packing(name: str) -> Packing:
    """Return a scheme by the name that an option takes: one of `PACKINGS`, or a kind of GGUF tensor (`q4_k`).

    Raises:
        InvalidParameterError: there is no such scheme.
    """
    key = _SAME.get(name.lower(), name.lower())
    if key in PACKINGS:
        return PACKINGS[key]
    kind = KIND_LAYOUTS.get(key)
    if kind is not None:
        return Packing(name=key, bits=8 * kind.block_bytes / kind.block_size, packs_all=True)
    raise InvalidParameterError(
        f"{quote(name)} is not a scheme of weights whose bytes are known",
        param="weight-dtype",
        because=f"the known ones are {', '.join(PACKINGS)} and the kinds of GGUF tensors, e.g. q4_k",
        hints=("`--weight-dtype fp8`",),
    )


def packing_from_hf(fields: Fields) -> Packing | None:
    """Read the scheme of a configuration; `None` where weights are as the dtype says.

    Raises:
        UnsupportedModelError: a scheme whose bytes we do not know.
    """
    if "quantization_config" not in fields:
        return None
    config = fields.inner("quantization_config")
    method = config.text("quant_method")
    return _without_excluded(_packing_of(method, config), config)


def _packing_of(method: str, config: Fields) -> Packing:
    match method:
        case "awq" | "gptq" | "auto-round":
            method = "gptq" if method == "auto-round" else method
            bits = config.whole("bits", config.whole("w_bit", 4))
            group = config.whole("group_size", config.whole("q_group_size", 128, minimum=-1), minimum=-1)
            if group == 0:
                raise config.error("group_size", "is 0; -1 says that a whole row is one group")
            group = 0 if group == -1 else group
            return replace(PACKINGS[method], bits=bits, zero_bits=bits, group_columns=group)
        case "fp8" | "fbgemm_fp8":
            is_blocked = "weight_block_size" in config
            return PACKINGS["fp8-block" if is_blocked else "fp8"]
        case "mxfp4":
            return PACKINGS["mxfp4"]
        case "modelopt" if config.text("quant_algo", "") in ("FP8", "NVFP4"):
            return PACKINGS[config.text("quant_algo").lower()]
        case "compressed-tensors":
            return _compressed(config)
        case "bitsandbytes":
            is_four = config.flag("load_in_4bit", default=False)
            return PACKINGS["bnb-nf4" if is_four else "w8a8"]
    raise UnsupportedModelError(
        f"{config.describe('quant_method')}, a scheme whose bytes cannot be counted",
        because="the known ones are awq, gptq, auto-round, fp8, fbgemm_fp8, mxfp4, modelopt (FP8 and NVFP4),"
        " compressed-tensors and bitsandbytes",
    )


def _compressed(config: Fields) -> Packing:
    """Read a scheme of compressed-tensors: bits, kind of number, and what shares a scale."""
    if "config_groups" not in config:
        raise UnsupportedModelError(
            f"{config.where}: quantization_config has no config_groups, so its bytes cannot be counted"
        )
    groups = config.inner("config_groups")
    weights = groups.inner(groups.names[0]).inner("weights")
    bits, is_float = weights.whole("num_bits"), weights.text("type", "int") == "float"
    strategy = weights.text("strategy", "channel")
    group = weights.whole("group_size") if strategy in ("group", "tensor_group") else 0
    if strategy == "tensor":
        return Packing(name=f"{'fp' if is_float else 'int'}{bits}", bits=bits, group_rows=0, scale_bytes=2)
    if strategy == "block":
        return PACKINGS["fp8-block"]
    is_nvfp4 = is_float and bits == 4
    return Packing(
        name=f"{'fp' if is_float else 'int'}{bits}",
        bits=bits,
        group_columns=group,
        scale_bytes=1 if is_nvfp4 else 2,
        zero_bits=0 if weights.flag("symmetric", default=True) else bits,
    )


def _without_excluded(packing: Packing, config: Fields) -> Packing:
    """Take out the parts that a config leaves as they are.

    Its lists name modules of the checkpoint, or patterns of them. A part is out if an entry names it for all layers, or
    entries do for most layers; a few layers more or less are a matter of a thousandth.
    """
    entries = [
        str(entry)
        for field in ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")
        for entry in _listed(config, field)
    ]
    roles, parts = packing.roles, packing.excluded
    for word, role in (("self_attn", "attention"), ("linear_attn", "state"), ("mamba", "state"), ("mixer", "state")):
        if _is_out(word, entries):
            roles = tuple(each for each in roles if each != role)
    for word in ("shared_expert", "indexer"):
        if _is_out(word, entries):
            parts = (*parts, word)
    return replace(packing, roles=roles, excluded=parts)


def _is_out(word: str, entries: list[str]) -> bool:
    named = [entry for entry in entries if word in entry]
    layers = {found.group() for entry in named if (found := _LAYER.search(entry))}
    return any(not _LAYER.search(entry) for entry in named) or len(layers) >= _MOST_LAYERS


def _listed(config: Fields, field: str) -> list[object]:
    value = config.raw(field)
    return value if isinstance(value, list) else []
