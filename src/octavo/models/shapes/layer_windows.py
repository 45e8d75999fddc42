"""Which layers see all tokens and which a window, from the fields that families use to say so.

Where a file leaves a field out, the family's own default in transformers counts. Families differ in what they look at:
some ask the list of kinds first, and some never look at it; there a list that says otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shapes.draft import ShapeDraft

Windows = tuple[int | None, ...]
_KINDS = ("full_attention", "sliding_attention")


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


def window_of(fields: Fields, default: int | None = None) -> int | None:
    """Return the window of a file: the family's default without the field, none where it says `null`."""
    if "sliding_window" in fields:
        return fields.whole("sliding_window")
    return None if "sliding_window" in fields.names else default


def full_windows(draft: ShapeDraft) -> Windows:
    """Give no layer a window; a list of kinds that says otherwise is refused."""
    layer_types_of(draft.fields, draft.num_layers, known=("full_attention",))
    return (None,) * draft.num_layers


def mistral_windows(draft: ShapeDraft) -> Windows:
    """Give every layer the window of the file; without the field, the family has one."""
    return uniform_windows(draft, window_of(draft.fields, 4096))


def uniform_windows(draft: ShapeDraft, window: int | None) -> Windows:
    """Give every layer the window, in families that look at no list of kinds."""
    return _as_listed(draft, window, (window is not None,) * draft.num_layers)


def sliding_windows(draft: ShapeDraft, window: int | None) -> Windows:
    """Give every layer the window, unless the file lists which layers have one."""
    types = layer_types_of(draft.fields, draft.num_layers, known=_KINDS)
    if types is None:
        return (window,) * draft.num_layers
    return typed_windows(draft.fields, types, window)


def typed_windows(fields: Fields, types: tuple[str, ...], window: int | None) -> Windows:
    """Return the window of each layer of a list of kinds."""
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "is missing", because="layer_types names sliding layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def alternating_windows(
    draft: ShapeDraft, *, period: int, default: int = 4096, pattern_field: str | None = None
) -> Windows:
    """Return windows where every `period`-th layer sees all; a list of kinds in the file comes first.

    Args:
        default: The window of files without the field.
        pattern_field: Where files of the family may give another period.
    """
    fields = draft.fields
    window = window_of(fields, default)
    if window is None:
        raise fields.error("sliding_window", "is null", because="layers of this family have a window")
    types = layer_types_of(fields, draft.num_layers, known=_KINDS)
    if types is not None:
        return typed_windows(fields, types, window)
    every = period if pattern_field is None else fields.whole(pattern_field, period)
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(draft.num_layers))


def qwen_windows(draft: ShapeDraft) -> Windows:
    """Qwen files carry window fields that `use_sliding_window` switches off; windowed layers are the last ones."""
    window = _switched_window(draft.fields)
    first = draft.fields.whole("max_window_layers", 28, minimum=0)
    return _listed_or(draft, window, [layer >= first for layer in range(draft.num_layers)])


def qwen2_moe_windows(draft: ShapeDraft) -> Windows:
    """Every other one of the first layers, where windows are switched on."""
    window = _switched_window(draft.fields)
    end = draft.fields.whole("max_window_layers", 28, minimum=0)
    return _listed_or(draft, window, [layer % 2 == 0 and layer < end for layer in range(draft.num_layers)])


def qwen3_moe_windows(draft: ShapeDraft) -> Windows:
    """All layers or none: `max_window_layers` is in files, and nothing looks at it."""
    return uniform_windows(draft, _switched_window(draft.fields))


def smollm3_windows(draft: ShapeDraft) -> Windows:
    """The layers without positions, where windows are switched on."""
    fields, num_layers = draft.fields, draft.num_layers
    window = _switched_window(fields, default=None)
    every = fields.whole("no_rope_layer_interval", 4)
    rotated = fields.raw("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers or any(flag not in (0, 1) for flag in rotated):
        raise fields.error("no_rope_layers", f"is not a list of {num_layers} zeros and ones")
    return _listed_or(draft, window, [not flag for flag in rotated])


def dots_windows(draft: ShapeDraft) -> Windows:
    """The last layers, from `max_window_layers` on."""
    first = draft.fields.whole("max_window_layers", 62, minimum=0)
    return _listed_or(draft, window_of(draft.fields, 4096), [layer >= first for layer in range(draft.num_layers)])


def _switched_window(fields: Fields, default: int | None = 4096) -> int | None:
    """Return the window where `use_sliding_window` says that there is one."""
    return window_of(fields, default) if fields.flag("use_sliding_window", default=False) else None


def _listed_or(draft: ShapeDraft, window: int | None, is_windowed: Sequence[bool]) -> Windows:
    """Return the windows that a list of kinds says, else those of a rule; without a window, no list may name one."""
    if window is None:
        return _as_listed(draft, None, [False] * draft.num_layers)
    types = layer_types_of(draft.fields, draft.num_layers, known=_KINDS)
    if types is not None:
        return typed_windows(draft.fields, types, window)
    return tuple(window if each else None for each in is_windowed)


def _as_listed(draft: ShapeDraft, window: int | None, is_windowed: Sequence[bool]) -> Windows:
    """Return the windows of a rule that no list of kinds can change.

    Raises:
        UnsupportedModelError: there is a list, and it says otherwise.
    """
    fields = draft.fields
    types = layer_types_of(fields, draft.num_layers, known=_KINDS) or ()
    for layer, found in enumerate(types):
        wanted = "sliding_attention" if is_windowed[layer] else "full_attention"
        if found != wanted:
            raise UnsupportedModelError(
                f"{fields.where}: layer_types[{layer}] is {found!r}, but the other window fields make it {wanted!r}"
            )
    return tuple(window if each else None for each in is_windowed)
