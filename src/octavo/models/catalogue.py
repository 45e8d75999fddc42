"""The catalogue: configurations of published models that come with the package, so that a plan needs no network.

Sizes of a model, not its weights; `data/models.json` holds them with their sources. A name may be shortened, as people
say it: `llama-3-70b` is `meta-llama/Meta-Llama-3-70B`. A name that could be several models is refused with the list.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octavo.errors import ModelNotFoundError
from octavo.units import quote

# Parts of a name that say how a model was tuned or packed, none of which changes a size.
_SAYS_NO_SIZE = frozenset({"instruct", "chat", "it", "base", "hf", "meta", "preview"})
_PART = re.compile(r"[a-z]+|\d+(?:\.\d+)*[a-z]*")
_MOST_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A published model's sizes.

    Args:
        name: As its publisher names it, `org/name`.
        config: Its `config.json`, as far as sizes go.
        source: Where that was read.
    """

    name: str
    config: Mapping[str, Any]
    source: str


def list_models() -> tuple[str, ...]:
    """Return the names of all models, in order of the alphabet."""
    return tuple(sorted(_models(), key=str.lower))


def find_model(asked: str) -> CatalogueModel:
    """Return a model by its name, or by as much of it as leaves no doubt.

    The full name counts first, then the name without its organisation, both in any case; then a beginning of it; then
    its parts in any order, of which some may be left out (`llama-3-70b`), or be more if they say nothing of the sizes
    (`...-Instruct`).

    Raises:
        ModelNotFoundError: no model is called so, or several are.
    """
    models = _models()
    for finds in (_same_name, _beginning, _same_parts):
        names = _least(finds(asked), asked)
        if len(names) == 1:
            config = models[names[0]]
            return CatalogueModel(name=names[0], config=config["config"], source=config["source"])
        if names:
            raise ModelNotFoundError(
                f"{quote(asked)} could be any of {len(names)} models",
                because=_list(names),
                hints=(f"say which one: `{names[0]}`",),
            )
    raise _unknown(asked)


def _same_name(asked: str) -> list[str]:
    wanted = asked.lower()
    full = [name for name in _models() if name.lower() == wanted]
    return full or [name for name in _models() if _short(name) == wanted]


def _beginning(asked: str) -> list[str]:
    """Return the names that begin so; what follows is a part of its own: `qwen3-8` does not begin `qwen3-8b`."""
    wanted = asked.lower()
    return [
        name
        for name in _models()
        for spelled in (name.lower(), _short(name))
        if wanted and spelled.startswith(wanted) and spelled[len(wanted) : len(wanted) + 1] in ("-", "_", "/")
    ]


def _same_parts(asked: str) -> list[str]:
    organisation, _, short = asked.lower().rpartition("/")
    wanted = _parts(short)
    sizes = wanted - _SAYS_NO_SIZE
    if not any(part[0].isdigit() for part in wanted):
        return []  # a name without a number is a family, not a model
    names = [name for name in _models() if not organisation or name.lower().startswith(f"{organisation}/")]
    # A part left out may only be one that a person would leave out where no other model differs by it.
    fewer = [name for name in names if wanted <= _parts(_short(name))]
    more = [name for name in names if sizes and sizes == _parts(_short(name)) - _SAYS_NO_SIZE]
    return fewer or more


def _least(names: list[str], asked: str) -> list[str]:
    """Of several names, keep those with the fewest parts that were not asked for.

    A shorter name wins over a longer one only where neither adds anything about sizes.
    """
    unique = list(dict.fromkeys(names))
    wanted = _parts(asked.lower().rpartition("/")[2])

    def extra(name: str) -> tuple[int, int]:
        parts = _parts(_short(name)) - wanted
        num_sizes = len(parts - _SAYS_NO_SIZE)
        return num_sizes, 0 if num_sizes else len(parts)

    least = min(map(extra, unique), default=(0, 0))
    return [name for name in unique if extra(name) == least]


def _unknown(asked: str) -> ModelNotFoundError:
    by_short = {_short(name): name for name in _models()} | {name.lower(): name for name in _models()}
    near = difflib.get_close_matches(asked.lower(), by_short, n=3, cutoff=0.55)
    names = list(dict.fromkeys(by_short[each] for each in near))
    return ModelNotFoundError(
        f"{quote(asked)} is not in the catalogue of {len(_models())} models",
        because="only sizes that came with the package are known without a file",
        hints=tuple(f"did you mean `{name}`?" for name in names) or ("give a folder, a `config.json` or a .gguf file",),
    )


def _list(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_LISTED])
    return shown if len(names) <= _MOST_LISTED else f"{shown} and {len(names) - _MOST_LISTED} more"


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _parts(text: str) -> frozenset[str]:
    """Cut `qwen2.5-7b-instruct` into `qwen`, `2.5`, `7b` and `instruct`."""
    return frozenset(_PART.findall(text))


@cache
def _models() -> Mapping[str, Any]:
    path = Path(__file__).with_name("data") / "models.json"
    models: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return models
