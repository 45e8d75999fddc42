"""A window put over a model that has none: what each query sees besides the last tokens are the first ones, the sinks.

Another model, in truth: it was not trained to forget, and its answers differ as soon as a gap opens between sinks and
window. Before that nothing changes. How positions are kept is said at `Attend` (program.py).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import InvalidParameterError
from octavo.models.spec import ModelSpec


def with_attention_window(spec: ModelSpec, *, window: int | None, num_sinks: int) -> ModelSpec:
    """Return the spec with a window of `window` tokens and `num_sinks` sinks on every layer; as it is without a window.

    Raises:
        InvalidParameterError: layers of the model see a window already.
    """
    if window is None:
        return spec
    own = next((group.window for group in spec.kv_groups if group.window is not None), None)
    if own is not None:
        raise InvalidParameterError(
            f"{spec.name} has layers with a window of {own:,} tokens of its own",
            param="attention_window",
            because="one window cannot replace another that the model was trained with",
            hints=("leave out --attention-window",),
        )
    groups = tuple(replace(group, window=window, num_sinks=num_sinks) for group in spec.kv_groups)
    assert groups, "a spec that can be run has KV groups"
    return replace(spec, kv_groups=groups)
