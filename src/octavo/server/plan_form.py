"""PlanForm: the plan tab's form, made from the planner's option table, and what it lets a stranger ask.

The command line may plan for any folder or file; a form may not, since no request opens a file or asks the network: its
models are those whose sizes come with the package, and the one that is served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.config.option import Option, did_you_mean
from octavo.errors import InvalidParameterError
from octavo.llm.plan import plan_document
from octavo.models.aliases import ALIASES
from octavo.models.catalogue import list_models
from octavo.planner.devices import list_devices
from octavo.planner.question import PLAN_OPTIONS

SCHEMA = "octavo.plan.form/1"
FIELDS = (
    "model",
    "device",
    "devices",
    "memory",
    "max_model_len",
    "weight_dtype",
    "kv_cache_dtype",
    "max_num_seqs",
    "lengths",
    "shared_prefix",
    "itl",
    "target_concurrency",
    "engine",
)
"""Options that the form offers, in this order; everything else is refused."""
MAX_VALUE_CHARS = 200
_OPTIONS = {option.name: option for option in PLAN_OPTIONS}


class PlanForm:
    """What the form offers, and its answers.

    Args:
        model: The served model as the server was asked for it; may be a path of this machine.
        shown_as: Its name to clients.
    """

    def __init__(self, model: str, *, shown_as: str) -> None:
        self._served = model
        self._shown_as = shown_as

    def document(self) -> dict[str, Any]:
        """Return the fields of the form, JSON-ready: name, label, help, choices or none, value, placeholder."""
        return {"schema": SCHEMA, "fields": [self._field(_OPTIONS[name]) for name in FIELDS]}

    def answer(self, words: Mapping[str, str]) -> dict[str, Any]:
        """Answer a filled-in form with an `octavo.plan/1` document.

        Raises:
            InvalidParameterError: a field or value that the form does not offer.
            OctavoError: as `octavo plan`.
        """
        for name, value in words.items():
            if name not in FIELDS:
                raise InvalidParameterError("the form has no such field", param=name[:MAX_VALUE_CHARS],
                                            hints=did_you_mean(name, FIELDS))  # fmt: skip
            if len(value) > MAX_VALUE_CHARS:
                raise InvalidParameterError(f"longer than {MAX_VALUE_CHARS} characters", param=name)
        model = words.get("model") or self._shown_as
        is_served = model == self._shown_as
        asked = self._served if is_served else model
        plan = plan_document({**words, "model": asked}, local_models=(asked,) if is_served else ())
        return _renamed(plan, asked, model)

    def _field(self, option: Option) -> dict[str, Any]:
        choices = list(option.choices) or None
        if option.name == "model":
            choices = list(dict.fromkeys((self._shown_as, *ALIASES, *list_models())))
        elif option.name == "device":
            choices = [device.id for device in list_devices() if device.kind != "cpu"]
        return {
            "name": option.name,
            "label": option.name.replace("_", " "),
            "help": option.help,
            "choices": choices,
            "value": self._shown_as if option.name == "model" else None,
            "placeholder": option.auto or option.show(option.default),
        }


def _renamed(plan: dict[str, Any], asked: str, shown: str) -> dict[str, Any]:
    """Say a model's public name wherever a plan says how the server was asked for it: that may be a path."""
    renamed: dict[str, Any] = json.loads(json.dumps(plan).replace(json.dumps(asked)[1:-1], json.dumps(shown)[1:-1]))
    return renamed
