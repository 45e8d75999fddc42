"""Where config values come from: flag or keyword > environment > file > default, and which of them spoke.

A source is a name and what it says; the first that names an option wins. Unknown names are errors with the closest
known one. The one exception is the environment: orchestrators put variables of their own there
(`OCTAVO_PORT=tcp://...` for a service called octavo), so only a name close to an option's is refused as a slip.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config.engine import OPTIONS, POOL_SIZES, EngineConfig, find_option
from octavo.config.option import ENV_PREFIX, Option, did_you_mean
from octavo.errors import InvalidParameterError

OTHER_ENV = ("OCTAVO_CACHE", "OCTAVO_TEST_MODEL")
"""Variables of ours that are not engine options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one place says.

    Args:
        values: Option name to the value as given.
        spellings: Option name to the way this place spells it, for errors (`--max-model-len`, `OCTAVO_SEED`).
    """

    name: str
    values: Mapping[str, object]
    spellings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConfig:
    """An `EngineConfig`, and for each option the place its value came from (`--seed`, `OCTAVO_SEED`, `default`)."""

    config: EngineConfig
    origins: Mapping[str, str]


def ask(*sources: Source) -> AskedConfig:
    """Combine sources, strongest first, into one config.

    Raises:
        InvalidParameterError: a value is not allowed, or one place sizes the KV pool twice; `param` is the spelling of
            the place that gave it.
    """
    overruled = overruled_pool_sizes(sources)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for each in OPTIONS:
        # `None` is "not given", as in `LLM(max_num_seqs=None)`: a weaker source may still speak.
        source = _speaker(sources, each.name)
        if source is None or each.name in overruled:
            origins[each.name] = "default"
            continue
        spelling = source.spellings.get(each.name, each.name)
        values[each.name] = each.read(source.values[each.name], param=spelling)
        origins[each.name] = source.name if spelling == each.name else spelling
    return AskedConfig(config=EngineConfig(**values), origins=origins)


def _speaker(sources: Sequence[Source], name: str) -> Source | None:
    """Return the strongest source that says something about an option."""
    return next((source for source in sources if source.values.get(name) is not None), None)


def overruled_pool_sizes(sources: Sequence[Source]) -> Sequence[str]:
    """Return the options that size the KV pool, less the one whose source is the strongest.

    They exclude each other, so a flag for one of them overrules a variable for another, as it would for the same one.

    Raises:
        InvalidParameterError: one place sizes the KV pool twice.
    """
    strongest = next((each for each in sources if any(each.values.get(name) is not None for name in POOL_SIZES)), None)
    if strongest is None:
        return ()
    asked = [name for name in POOL_SIZES if strongest.values.get(name) is not None]
    if len(asked) > 1:
        first, second = (strongest.spellings.get(name, name) for name in asked)
        raise InvalidParameterError(
            f"given together with {second}",
            param=first,
            because="both set the size of the KV pool",
            hints=("give one of them",),
        )
    return [name for name in POOL_SIZES if name not in asked]


def keyword_source(keywords: Mapping[str, object]) -> Source:
    """Read Python keywords, aliases included: `LLM(model, gpu_memory_utilization=0.8)`.

    Raises:
        InvalidParameterError: an unknown keyword, or one option given under two names.
    """
    values: dict[str, object] = {}
    spellings: dict[str, str] = {}
    for keyword, value in keywords.items():
        each = find_option(keyword)
        if each is None:
            raise InvalidParameterError(
                "there is no such option", param=keyword, hints=did_you_mean(keyword, _all_names())
            )
        if each.name in values:
            raise InvalidParameterError(f"the same option as {spellings[each.name]}, given twice", param=keyword)
        values[each.name] = value
        spellings[each.name] = keyword
    return Source(name="keyword", values=values, spellings=spellings)


def environment_source(environ: Mapping[str, str]) -> Source:
    """Read `OCTAVO_*` variables; an empty one counts as unset.

    Raises:
        InvalidParameterError: a variable that looks like a misspelt option.
    """
    by_env = {each.env: each for each in OPTIONS}
    named = {by_env[name].name: name for name, value in environ.items() if name in by_env and value}
    for name in foreign_variables(environ):
        close = difflib.get_close_matches(name, tuple(by_env), n=1, cutoff=0.85)
        if close:
            raise InvalidParameterError(
                "there is no such option", param=name, hints=(f"did you mean {close[0]}?", f"or unset {name}")
            )
    return Source(name="environment", values={option: environ[name] for option, name in named.items()}, spellings=named)


def foreign_variables(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the `OCTAVO_*` variables that set nothing here, sorted."""
    known = {each.env for each in OPTIONS} | set(OTHER_ENV)
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)


def explain(option: Option, asked: AskedConfig) -> str:
    """Return one option's value for a person: `4.0 GiB (OCTAVO_KV_CACHE_MEMORY)`."""
    return f"{option.show(getattr(asked.config, option.name))} ({asked.origins[option.name]})"


def _all_names() -> tuple[str, ...]:
    return tuple(name for each in OPTIONS for name in (each.name, *each.aliases))
