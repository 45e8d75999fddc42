"""Whether the native kernels can be used on this machine."""

from __future__ import annotations


def native_refusal() -> str:
    """Say why the native runner cannot be used here; empty if it can."""
    try:
        from octavo.runtime import _native  # noqa: F401, PLC0415 - the question is whether it can be imported
    except ImportError as error:
        return f"the native module is missing ({error})"
    return ""
