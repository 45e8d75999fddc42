"""Plans a model by its name: finds what can be known of it here, and asks the planner.

plan = plan_for(PlanQuestion(model="smollm2-135m", memory=2 * GIB))
plan_document({"model": "llama-3-70b", "device": "h100-80gb", "devices": "4"})    # what a form sends, as JSON
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.config.machine import Machine, read_machine
from octavo.errors import InvalidParameterError
from octavo.llm.find_subject import find_subject
from octavo.llm.native_refusal import native_refusal
from octavo.planner.plan import Plan, Surroundings, make_plan
from octavo.planner.question import PlanQuestion, question_from_words


def plan_for(
    question: PlanQuestion,
    *,
    machine: Machine | None = None,
    environ: Mapping[str, str] | None = None,
    calibrate_path: Path | None = None,
    is_bundled_only: bool = False,
) -> Plan:
    """Answer a question.

    Args:
        machine: This machine; read when not given.
        environ: Says where models are kept.
        calibrate_path: A start-up log, or measured speed, to learn from.
        is_bundled_only: Take no model from a path or from the network.

    Raises:
        ModelError: nothing by that name, or a model whose bytes we do not know how to count.
        InvalidParameterError: a value contradicts the model, the device or another value.
    """
    environ = os.environ if environ is None else environ
    surroundings = Surroundings(
        machine=machine or read_machine(), native_refusal=native_refusal(), calibrate_path=calibrate_path
    )
    subject = find_subject(question.model, environ, is_bundled_only=is_bundled_only)
    return make_plan(question, subject, surroundings=surroundings)


def plan_document(words: Mapping[str, object], *, local_models: Collection[str] = ()) -> dict[str, Any]:
    """Answer a form: option names and their values as text, as on the command line.

    Whoever fills in a form may be somewhere else, so files of this machine are not read for it, and the network is
    not asked.

    Args:
        local_models: Paths and hub ids that may be asked for all the same, such as the model that is served.

    Raises:
        As `plan_for`.
    """
    question = question_from_words(words)
    if question.trace is not None:
        raise InvalidParameterError("files are read on the command line only", param="trace")
    return plan_for(question, is_bundled_only=question.model not in local_models).as_dict()
