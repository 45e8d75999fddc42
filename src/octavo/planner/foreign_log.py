"""Refuses a start-up log that is not of the start that is planned: another model, release, or cut over devices.

What a log teaches is wrong for another model however much its weights weigh, so everything that it states is compared:
the model's name where the catalogue knows it, and what a token costs in its KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from octavo.errors import InvalidParameterError, ModelError
from octavo.models.catalogue import find_model
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.advice import as_flags, rank_options
from octavo.planner.engine_version import EngineVersion, parse_version
from octavo.planner.kv_arithmetic import NEWEST, kv_layout
from octavo.planner.kv_format import Engine
from octavo.planner.question import PlanQuestion
from octavo.planner.sizer import ranks
from octavo.planner.start_log import StartLog
from octavo.planner.subject import Subject
from octavo.units import format_bytes, quote

# Tokens are logged of one worker and bytes of another, and a draft layer adds its share: a few parts in a hundred.
_SAME_RATE = 0.08
_SAME_PARAMETERS = 0.05
_RANKS = (1, 2, 4, 8, 16)
_KV_DTYPES = ("bf16", "fp8")
"""What other engines can have been told, by the bits of an element; logs do not always say."""


def refuse_foreign(log: StartLog, question: PlanQuestion, subject: Subject) -> None:
    """Return when nothing that the log states contradicts the question.

    Args:
        question: As asked, before the log completes it.

    Raises:
        InvalidParameterError: something does; it says what.
    """
    _check_release(log, question)
    _check_ranks(log, question)
    _check_name(log, subject)
    _check_rate(log, question, subject)


def _check_release(log: StartLog, question: PlanQuestion) -> None:
    if question.engine_version is None or log.version is None:
        return
    asked, logged = parse_version(question.engine_version), _version(log)
    if (asked.major, asked.minor) != (logged.major, logged.minor):
        raise InvalidParameterError(
            f"the log is of {log.engine} {log.version}, the plan is for {question.engine_version}",
            param="calibrate",
            because="rules differ between releases, and so does what they are off by",
            hints=(f"`--engine-version {logged.major}.{logged.minor}`",),
        )


def _check_ranks(log: StartLog, question: PlanQuestion) -> None:
    is_cut = question.devices or question.tensor_parallel_size or question.pipeline_parallel_size
    if not is_cut or log.tensor_parallel_size is None:
        return
    logged = log.tensor_parallel_size, log.pipeline_parallel_size or 1
    if ranks(question) != logged:
        raise InvalidParameterError(
            f"the log is of {_cut(*logged)}, the plan is for {_cut(*ranks(question))}",
            param="calibrate",
            because="what a device spends beside its share of the weights depends on how a model is cut",
            hints=_cut_hints(question, *logged),
        )


def _check_name(log: StartLog, subject: Subject) -> None:
    """Compare with what the catalogue knows under the logged name; a name that it does not know says nothing."""
    known = _known_shape(log.model)
    if known is None:
        return
    differences = list(_differences(known, subject.shape))
    if differences:
        raise InvalidParameterError(
            f"the log is of {quote(log.model)}, the plan is for {subject.name}",
            param="calibrate",
            because=f"they differ: {'; '.join(differences)}",
            hints=(f"plan for {known.name}, or give a log of {subject.name}",),
        )


def _differences(logged: ModelShape, planned: ModelShape) -> Iterator[str]:
    if len(logged.layers) != len(planned.layers):
        yield f"{len(logged.layers)} layers against {len(planned.layers)}"
    elif [layer.kv for layer in logged.layers] != [layer.kv for layer in planned.layers]:
        yield f"{_kept(logged)} in a layer's KV cache against {_kept(planned)}"
    ratio = logged.num_parameters / planned.num_parameters
    if not 1 - _SAME_PARAMETERS < ratio < 1 / (1 - _SAME_PARAMETERS):
        yield f"{logged.num_parameters / 1e9:,.2f} B parameters against {planned.num_parameters / 1e9:,.2f} B"


def _kept(shape: ModelShape) -> str:
    kinds = dict.fromkeys(layer.kv for layer in shape.layers if layer.kv is not None)
    words = [
        f"{kv.num_kv_heads} heads of {kv.key_dim}" + (f" in a window of {kv.window:,}" if kv.window else "")
        for kv in kinds
    ]
    return " and ".join(words) or "nothing"


def _known_shape(name: str | None) -> ModelShape | None:
    """Return the shape of a published model; a path counts by its last part."""
    if name is None:
        return None
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    try:
        found = find_model(name.rstrip("/").rpartition("/")[2] if is_path else name)
        return shape_from_hf(found.config, where=found.name, name=found.name)
    except ModelError:
        return None


def _check_rate(log: StartLog, question: PlanQuestion, subject: Subject) -> None:
    """Compare bytes per token of the logged pool with every KV dtype that it may have had."""
    logged = _logged_rate(log)
    asked = ranks(question)
    rates = _rates(log, question, subject, log.tensor_parallel_size or asked[0], log.pipeline_parallel_size or asked[1])
    if logged is None or not rates or _is_one_of(logged, rates):
        return
    if log.tensor_parallel_size is None:
        _check_other_cuts(log, question, subject, logged)
    words = ", ".join(f"{format_bytes(rate)} in {name}" for name, rate in rates.items())
    raise InvalidParameterError(
        f"the log is of another model: its KV cache takes {format_bytes(logged)} a token on one device,"
        f" {subject.name} takes {words}",
        param="calibrate",
        because="a log teaches about the model that was started; "
        + (f"it names {quote(log.model)}" if log.model else "it names no model"),
        hints=(f"give a log of {subject.name}, or plan for the model of the log",),
    )


def _check_other_cuts(log: StartLog, question: PlanQuestion, subject: Subject, logged: float) -> None:
    """Say so where it is the same model, cut over another number of devices; such a log does not state it."""
    asked, stages = ranks(question)
    for tensor in _RANKS:
        if tensor != asked and _is_one_of(logged, _rates(log, question, subject, tensor, stages)):
            raise InvalidParameterError(
                f"the log is of {_cut(tensor, stages)}, the plan is for {_cut(asked, stages)}",
                param="calibrate",
                because=f"its KV cache takes {format_bytes(logged)} a token on one device",
                hints=_cut_hints(question, tensor, stages),
            )


def _is_one_of(logged: float, rates: Mapping[str, float]) -> bool:
    return any(1 - _SAME_RATE < logged / rate < 1 + _SAME_RATE for rate in rates.values())


def _logged_rate(log: StartLog) -> float | None:
    tokens, pool_bytes = log.pool_tokens, log.kv_pool_bytes or 0
    if not tokens and log.max_concurrency and log.max_model_len:
        tokens = int(log.max_concurrency * log.max_model_len)
    return pool_bytes / tokens if tokens and pool_bytes > 0 else None


def _rates(log: StartLog, question: PlanQuestion, subject: Subject, tensor: int, stages: int) -> Mapping[str, float]:
    """Return what a token may have cost, by KV dtype; of models whose layers differ, a log tells too little."""
    rates: dict[str, float] = {}
    kinds = {(layer.kv.kind if layer.kv else None, layer.state is None) for layer in subject.shape.layers}
    if log.engine == "llama.cpp" or kinds != {("full", True)} or stages > len(subject.shape.layers):
        return rates
    engine: Engine = log.engine
    is_wide = "f32" in (question.weight_dtype, question.kv_cache_dtype)
    for dtype in ("f32", *_KV_DTYPES) if is_wide else _KV_DTYPES:
        layout = kv_layout(
            subject.shape,
            engine=engine,
            version=_version(log) if engine == "vllm" else NEWEST,
            kv_dtype=dtype,
            block_size=log.block_size,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
        )
        if log.max_model_len or not layout.is_counted_by_concurrency:
            rates[layout.kv_format.name] = layout.logged_token_bytes(log.max_model_len)
    return rates


def _version(log: StartLog) -> EngineVersion:
    try:
        return NEWEST if log.version is None else parse_version(log.version)
    except InvalidParameterError:
        return NEWEST


def _cut_hints(question: PlanQuestion, tensor: int, stages: int) -> tuple[str, ...]:
    options = rank_options(question, tensor, stages)
    if stages != ranks(question)[1]:
        options["pipeline_parallel_size"] = str(stages)
    return f"`{as_flags(options)}`", "or give the log of a start that was cut so"


def _cut(tensor: int, stages: int) -> str:
    words = f"tensor parallel size {tensor}"
    return words + (f" and {stages} stages" if stages > 1 else "")
