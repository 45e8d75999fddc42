"""What a file teaches a plan: the start-up log of another engine, or the speed that was measured on a machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from octavo.config.text_file import read_text_file
from octavo.errors import InvalidParameterError
from octavo.planner.calibrate import Calibration, calibrate
from octavo.planner.foreign_log import refuse_foreign
from octavo.planner.forward_shape import forward_shape
from octavo.planner.other_sizing import settings_of
from octavo.planner.question import PlanQuestion
from octavo.planner.roofline import DeviceSpeed, measured_speed
from octavo.planner.sizer import device_of, engine_of, ranks
from octavo.planner.start_log import StartLog, read_start_log
from octavo.planner.subject import Subject
from octavo.units import MIB, quote

MAX_LOG_BYTES = 16 * MIB
KERNEL_BENCH_SCHEMA = "octavo.bench.kernels/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What came out of the file.

    Args:
        question: The question, completed by what the log states about engine, release, memory and devices.
    """

    question: PlanQuestion
    calibration: Calibration | None = None
    speed: DeviceSpeed | None = None


def learn(path: Path, question: PlanQuestion, subject: Subject) -> Learned:
    """Read a start-up log of vLLM or SGLang, or what `octavo bench kernels --json` wrote.

    Raises:
        InvalidParameterError: the file is neither, or does not suit the question.
        MachineError: it cannot be read.
    """
    text = read_text_file(
        path,
        param="calibrate",
        what="a start-up log",
        max_bytes=MAX_LOG_BYTES,
        is_lenient=True,
        hints=(f"give what was written until the server answered, as `head -n 5000 {path} > start.log`",),
    )
    measured = _measured(text, path)
    if measured is not None:
        _check_is_cpu(question)
        return Learned(question=question, speed=measured)
    log = read_start_log(text)
    completed = _completed(question, log)
    refuse_foreign(log, question, subject)
    tensor, stages = ranks(completed)
    weights, _ = subject.weights_on_one(
        completed.weight_dtype, tensor=tensor, stages=stages, is_padded=log.engine == "vllm"
    )
    calibration = calibrate(
        log,
        forward=forward_shape(subject.shape),
        weights=weights,
        settings=settings_of(completed, completed.max_model_len or subject.shape.max_position, tensor, stages),
        device=device_of(completed),
        weights_from="files" if subject.stored_bytes and completed.weight_dtype == "auto" else "config",
    )
    return Learned(question=completed, calibration=calibration)


def _completed(question: PlanQuestion, log: StartLog) -> PlanQuestion:
    if log.engine == "llama.cpp":
        return question  # `calibrate` says what cannot be learnt from it
    if question.engine not in ("auto", log.engine):
        raise InvalidParameterError(
            f"the log is one of {log.engine}, the plan is for {question.engine}",
            param="calibrate",
            because="engines spend memory by rules of their own",
            hints=(f"`--engine {log.engine}`",),
        )
    values: dict[str, Any] = {"engine": log.engine}
    if question.engine_version is None and log.version is not None:
        values["engine_version"] = log.version
    is_cut = question.devices or question.tensor_parallel_size or question.pipeline_parallel_size
    if not is_cut:
        values["tensor_parallel_size"] = log.tensor_parallel_size or None
        values["pipeline_parallel_size"] = log.pipeline_parallel_size or None
    if question.device is None and question.memory is None and log.visible_bytes is not None:
        values["memory"] = log.visible_bytes
    for name in ("utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(question, name) is None and getattr(log, name):  # no engine starts with a limit of 0
            values[name] = getattr(log, name)
    return replace(question, **values)


def _check_is_cpu(question: PlanQuestion) -> None:
    """Refuse the speed of a CPU for anything else."""
    device = device_of(question)
    if engine_of(question) == "octavo" and (device is None or device.kind in ("cpu", "unified")):
        return
    raise InvalidParameterError(
        f"the file holds a CPU's speed, the plan is for {device.name if device else question.engine}",
        param="calibrate",
        because="`octavo bench kernels` measures the machine that it runs on",
        hints=("leave out --calibrate", "leave out --device to plan for this machine"),
    )


def _measured(text: str, path: Path) -> DeviceSpeed | None:
    """Return the speed in a document of `octavo bench kernels`; `None` for a text that is no document of Octavo's.

    Raises:
        InvalidParameterError: another document, or one without a speed.
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    schema = document.get("schema")
    if not isinstance(schema, str) or not schema.startswith("octavo."):
        return None
    limits = document.get("limits") if schema == KERNEL_BENCH_SCHEMA else None
    found = limits if isinstance(limits, dict) else {}
    gb_per_s, gflop_per_s = (found.get(f"{name}_per_s") for name in ("memory_read_gb", "matrix_product_gflop"))
    if not _is_speed(gb_per_s) or not _is_speed(gflop_per_s):
        because = f"it is {quote(schema)}, and {KERNEL_BENCH_SCHEMA} was expected"
        if schema == KERNEL_BENCH_SCHEMA:
            because = f"it says {quote(gb_per_s)} GB/s read and {quote(gflop_per_s)} GFLOP/s"
        raise InvalidParameterError(
            f"{path} holds no measured speed",
            param="calibrate",
            because=because,
            hints=("`octavo bench kernels --json > speed.json`",),
        )
    return measured_speed(
        gb_per_s=gb_per_s,
        gflop_per_s=gflop_per_s,
        source=f"measured by `octavo bench kernels`: {gb_per_s:,.1f} GB/s read, {gflop_per_s:,.1f} GFLOP/s",
    )


def _is_speed(value: object) -> TypeGuard[float]:
    """Tell whether a value is a rate that some machine may have, and no JSON's `NaN` or `1e400`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-3 < value < 1e9
