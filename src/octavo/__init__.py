"""Octavo: serve language models from a paged KV cache, on the machine you own.

    from octavo import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

Importing this package imports nothing heavy; each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.sampling import SamplingParams
    from octavo.core.structured import StructuredOutput
    from octavo.errors import OctavoError
    from octavo.llm.async_llm import AsyncLLM
    from octavo.llm.offline import LLM
    from octavo.llm.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.llm.offline",
    "AsyncLLM": "octavo.llm.async_llm",
    "CompletionOutput": "octavo.llm.outputs",
    "Logprob": "octavo.llm.outputs",
    "OctavoError": "octavo.errors",
    "RequestOutput": "octavo.llm.outputs",
    "SamplingParams": "octavo.core.sampling",
    "StructuredOutput": "octavo.core.structured",
    "__version__": "octavo.version",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
