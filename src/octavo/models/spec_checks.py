"""The last step of every configuration reader: sizes that must agree, and the facts that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import ModelFileError
from octavo.models.kv_groups import make_kv_groups
from octavo.models.names import count_parameters
from octavo.models.spec import ModelSpec

MAX_LAYERS = 10_000


def complete_spec(spec: ModelSpec, *, windows: Sequence[int | None], where: str) -> ModelSpec:
    """Return the spec with its KV groups and its number of parameters.

    Args:
        windows: For each layer, the tokens a query sees; `None` means all.
        where: Start of the error messages: the file.

    Raises:
        ModelFileError: heads do not divide evenly, or cannot be rotated in pairs.
    """
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFileError(
            f"{where}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly"
        )
    if spec.head_dim % 2:
        raise ModelFileError(
            f"{where}: heads have {spec.head_dim} dimensions", because="rotary positions turn pairs of dimensions"
        )
    distinct = {window for window in windows if window is not None}
    return replace(
        spec,
        sliding_window=min(distinct) if distinct else None,
        kv_groups=make_kv_groups(windows),
        num_parameters=count_parameters(spec),
    )


def derive_head_dim(hidden_size: int, num_heads: int, *, where: str) -> int:
    """Return the width of a head where the file does not give one."""
    if hidden_size % num_heads:
        raise ModelFileError(f"{where}: a hidden size of {hidden_size} does not divide into {num_heads} heads")
    return hidden_size // num_heads


def check_num_layers(num_layers: int, *, where: str) -> int:
    """Refuse a number of layers that no model has, before tables of that length are made."""
    if num_layers > MAX_LAYERS:
        raise ModelFileError(f"{where}: {num_layers:,} layers", because=f"at most {MAX_LAYERS:,} are believed")
    return num_layers
