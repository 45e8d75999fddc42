"""Sizer: answers "and if ...?" about one model: the same question, changed, by the rules of the right engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.config.machine import Machine
from octavo.errors import InvalidParameterError
from octavo.planner.devices import Device, find_device
from octavo.planner.estimate import exact
from octavo.planner.question import SCHEMES, EngineName, PlanQuestion, default_of, engine_config
from octavo.planner.sizing import Sizing
from octavo.planner.subject import AS_IS, Hypothesis, Subject
from octavo.units import format_bytes

if TYPE_CHECKING:
    from octavo.planner.calibrate import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizer:
    """Divides memory for one model.

    Args:
        machine: This machine, for plans without a device.
        native_refusal: Why the native runner cannot be used on it; empty if it can.
        calibration: What a start-up log taught about the other engine.
    """

    subject: Subject
    machine: Machine
    native_refusal: str = ""
    calibration: Calibration | None = None

    def size(self, question: PlanQuestion, hypothesis: Hypothesis = AS_IS) -> Sizing:
        """Divide the memory as asked.

        Raises:
            InvalidParameterError: a value contradicts the model, the device or another value.
            UnsupportedModelError: Octavo does not run this model.
        """
        if engine_of(question) == "octavo":
            return self._size_octavo(question, hypothesis)
        question = replace(question, engine=engine_of(question))
        _refuse_octavos_options(question)
        if self.calibration is not None and ranks(question) != self.calibration.ranks:
            raise InvalidParameterError(
                "the log is of a start that was cut otherwise",
                param="calibrate",
                because="what a device spends beside its share of the weights depends on how a model is cut",
            )
        device = device_of(question)
        visible = (
            exact(question.memory, source=f"--memory {format_bytes(question.memory)}") if question.memory else None
        )
        if device is None and visible is None:
            raise InvalidParameterError(
                f"{question.engine} needs to know its device",
                param="device",
                because="this machine is planned for Octavo, which runs on CPUs",
                hints=("`--device h100-80gb`, or any other of `--list-devices`", "`--memory 80GiB`"),
            )
        from octavo.planner.other_sizing import size_other  # noqa: PLC0415 - a plan for Octavo need not wait for it

        return size_other(
            question,
            self.subject,
            self.subject.under(hypothesis),
            device=device,
            visible=visible,
            ranks=ranks(question),
            calibration=self.calibration,
        )

    def _size_octavo(self, question: PlanQuestion, hypothesis: Hypothesis) -> Sizing:
        _refuse_parallel(question)
        _refuse_others_options(question)
        config = engine_config(question)
        device, machine = device_of(question), self.machine
        if device is not None:
            if device.kind not in ("cpu", "unified"):
                raise InvalidParameterError(
                    f"Octavo does not run on {device.name}",
                    param="engine",
                    because="it computes on CPUs",
                    hints=("`--engine vllm`", "or a CPU of `--list-devices`"),
                )
            # Whoever names a machine means all of it, so its memory counts as asked for.
            config = replace(config, memory=config.memory or device.visible_bytes)
        native_refusal = self.native_refusal
        if config.memory is not None:
            machine = replace(machine, available_bytes=config.memory, resident_bytes=0)
        if device is not None:
            native_refusal = ""
        from octavo.planner.octavo_sizing import size_octavo  # noqa: PLC0415 - likewise

        facts = self.subject.octavo_facts(config, native_refusal=native_refusal)
        return size_octavo(config, machine, hypothesis.on_facts(facts), purpose=question.purpose)


def engine_of(question: PlanQuestion) -> EngineName:
    """Return whose rules count, as far as the question says."""
    return choose_engine(question, None)[0]


def choose_engine(question: PlanQuestion, subject: Subject | None) -> tuple[EngineName, str]:
    """Return whose rules count, and why; the reason is empty where it was asked, or where it is Octavo."""
    if question.engine != "auto":
        return question.engine, ""
    device = device_of(question)
    if device is not None and device.kind != "cpu":
        return "vllm", f"the default on {'a GPU' if device.kind == 'gpu' else 'an accelerator'}"
    if max(ranks(question)) > 1:
        return "vllm", "the default for several devices"
    if question.engine_version is not None:
        return "vllm", "the default with a version"
    if subject is not None and subject.octavo_refusal is not None and question.memory is not None:
        return "vllm", f"Octavo does not run {subject.shape.architecture}"
    return "octavo", ""


def device_of(question: PlanQuestion) -> Device | None:
    """Return the device that was named.

    Raises:
        InvalidParameterError: there is no such device in the table.
    """
    return None if question.device is None else find_device(question.device)


def ranks(question: PlanQuestion) -> tuple[int, int]:
    """Return the devices that share each layer, and the stages that the layers are cut into."""
    stages = question.pipeline_parallel_size or 1
    return question.tensor_parallel_size or max(1, (question.devices or 1) // stages), stages


def _refuse_parallel(question: PlanQuestion) -> None:
    tensor, stages = ranks(question)
    if tensor * stages > 1:
        raise InvalidParameterError(
            f"{tensor * stages} devices for one copy of the model",
            param="devices",
            because="Octavo runs one model in one process",
            hints=("`--engine vllm`",),
        )


def _refuse_others_options(question: PlanQuestion) -> None:
    for param in ("engine_version", "enforce_eager"):
        if question.value(param):
            raise InvalidParameterError(
                "is for other engines", param=param, because="this plan is for Octavo", hints=("`--engine vllm`",)
            )
    if question.weight_dtype in SCHEMES:
        raise InvalidParameterError(
            f"{question.weight_dtype} is for other engines",
            param="weight_dtype",
            because="Octavo packs weights as int8 or int4, and holds those of a GGUF file as they are",
            hints=("`--weight-dtype int4`", "give the .gguf file as MODEL", "`--engine vllm`"),
        )


_OWN_OPTIONS = (
    "attention_window",
    "attention_sinks",
    "sparse_blocks",
    "kv_cache_dtype_skip_layers",
    "threads",
    "runner",
    "purpose",
    "kv_prefault",
)
"""What only Octavo has, of the options that can change where memory goes."""


def _refuse_octavos_options(question: PlanQuestion) -> None:
    own = (*_OWN_OPTIONS, "scheduling_policy") if question.engine == "sglang" else _OWN_OPTIONS
    for param in own:
        if question.value(param) != default_of(param):
            flag = f"--{param.replace('_', '-')}"
            raise InvalidParameterError(
                f"{question.engine} has no such option",
                param=param,
                because="it is one of Octavo's own",
                hints=(f"leave out {flag}", "`--engine octavo`, on a machine whose CPUs compute"),
            )
