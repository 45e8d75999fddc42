"""Which layers see all tokens and which a window, from the fields that families use to say so."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shapes.draft import ShapeDraft

Windows = tuple[int | None, ...]


def layer_types_of(fields: Fields, num_layers: int, *, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the kind of each layer as the file lists it; `None` where it does not.

    Raises:
        UnsupportedModelError: a kind that is not in `known`.
    """
    types = fields.raw("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error("layer_types", f"is not a list of {num_layers} names, one a layer")
    for layer, found in enumerate(types):
        if found not in known:
            raise UnsupportedModelError(
                f"{fields.where}: layer_types[{layer}] is {found!r}, a kind of layer that cannot be counted",
                because=f"the known ones are {', '.join(known)}",
            )
    return tuple(types)


def full_windows(draft: ShapeDraft) -> Windows:
    """Give no layer a window; a list of kinds that says otherwise is refused."""
    layer_types_of(draft.fields, draft.num_layers, known=("full_attention",))
    return (None,) * draft.num_layers


def mistral_windows(draft: ShapeDraft) -> Windows:
    """Give every layer the window of the file: without the field the family's default, with `null` none."""
    fields = draft.fields
    default = None if "sliding_window" in fields.names else 4096
    window = fields.whole("sliding_window", default) if default or "sliding_window" in fields else None
    return sliding_windows(draft, window)


def sliding_windows(draft: ShapeDraft, window: int | None) -> Windows:
    """Give every layer the window, unless the file lists which layers have one."""
    types = layer_types_of(draft.fields, draft.num_layers, known=("full_attention", "sliding_attention"))
    if types is None:
        return (window,) * draft.num_layers
    return typed_windows(draft.fields, types, window)


def typed_windows(fields: Fields, types: tuple[str, ...], window: int | None) -> Windows:
    """Return the window of each layer of a list of kinds."""
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "is missing", because="layer_types names sliding layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def alternating_windows(draft: ShapeDraft, *, period: int) -> Windows:
    """Return windows where every `period`-th layer sees all; a list of kinds in the file comes first.

    Gemma 2 (period 2), Gemma 3 (6) and Cohere 2 (4) count so when the file gives no list.
    """
    fields = draft.fields
    window = fields.whole("sliding_window")
    types = layer_types_of(fields, draft.num_layers, known=("full_attention", "sliding_attention"))
    if types is not None:
        return typed_windows(fields, types, window)
    every = fields.whole("sliding_window_pattern", period)
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(draft.num_layers))


def qwen_windows(draft: ShapeDraft) -> Windows:
    """Qwen files carry window fields that `use_sliding_window` switches off; windowed layers are the last ones."""
    fields, num_layers = draft.fields, draft.num_layers
    is_used = fields.flag("use_sliding_window", default=False) and "sliding_window" in fields
    types = layer_types_of(fields, num_layers, known=("full_attention", "sliding_attention"))
    if types is not None:
        return typed_windows(fields, types, fields.whole("sliding_window") if is_used else None)
    if not is_used:
        return (None,) * num_layers
    first, window = fields.whole("max_window_layers", 28, minimum=0), fields.whole("sliding_window")
    return tuple(window if layer >= first else None for layer in range(num_layers))
