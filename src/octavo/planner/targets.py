"""The inverse question: what would hold so many requests at once? Each answer was planned and holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from octavo.errors import CapacityError, InvalidParameterError
from octavo.planner.advice import as_flags, rank_options, with_options
from octavo.planner.devices import list_devices
from octavo.planner.lengths import Lengths
from octavo.planner.question import PlanQuestion
from octavo.planner.sizer import Sizer, ranks
from octavo.planner.sizing import Sizing
from octavo.units import MIB

_RANKS = (1, 2, 4, 8, 16)
_SMALLER_DTYPES = ("fp8", "int8", "int4")
_MAX_OTHER_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswer:
    """One way to hold the requests.

    Args:
        name: In words.
        options: The options that make it so, by name, as a person writes them; empty when it is so already.
        num_devices: Devices of one copy of the model.
        num_copies: Copies of the model that share the requests.
        concurrency: What it holds, of all copies together.
    """

    name: str
    options: Mapping[str, str] = field(hash=False)
    num_devices: int = 1
    num_copies: int = 1
    concurrency: float

    @property
    def flags(self) -> str:
        return as_flags(self.options)


def find_targets(
    sizer: Sizer, question: PlanQuestion, base: Sizing, lengths: Lengths | None
) -> tuple[TargetAnswer, ...]:
    """Return what holds `target_concurrency` requests: of the asked lengths, or else of `max_model_len` tokens."""
    assert question.target_concurrency is not None, "asked only where there is a target"
    search = _Search(sizer, question, base, lengths, question.target_concurrency)
    if base.engine == "octavo":
        return tuple(search.memories())
    return tuple(search.own_device()) + tuple(search.copies()) + tuple(search.other_devices())


def holds_target(sizer: Sizer, question: PlanQuestion, base: Sizing, lengths: Lengths | None) -> bool:
    """Tell whether the plan as it stands holds them, seats included."""
    assert question.target_concurrency is not None, "asked only where there is a target"
    search = _Search(sizer, question, base, lengths, question.target_concurrency)
    return base.fits and base.max_num_seqs >= search.target and search.concurrency(base) >= search.target


@dataclass(frozen=True, slots=True)
class _Search:
    sizer: Sizer
    question: PlanQuestion
    base: Sizing
    lengths: Lengths | None
    target: int

    def concurrency(self, sizing: Sizing) -> float:
        num_tokens = self.base.max_model_len or self.base.length_limit
        kept = self.lengths.up_to(num_tokens) if self.lengths else None
        if kept is not None:
            return sizing.concurrency_at(kept, shared_tokens=self.question.shared_prefix or 0)
        return sizing.concurrency_of(num_tokens, shared_tokens=self.question.shared_prefix or 0)

    def tried(self, options: Mapping[str, str]) -> float | None:
        """Return how many requests a change holds; `None` if the engine does not start with it."""
        try:
            sizing = self.sizer.size(with_options(self.question, {**options, **self._more_seats()}))
        except (InvalidParameterError, CapacityError):
            return None
        return self.concurrency(sizing) if sizing.fits else None

    def _more_seats(self) -> dict[str, str]:
        if self.base.max_num_seqs >= self.target:
            return {}
        batched = max(self.target, self.base.max_num_batched_tokens)
        return {"max_num_seqs": str(self.target), "max_num_batched_tokens": str(batched)}

    def answer(self, name: str, options: dict[str, str], **counts: int) -> TargetAnswer | None:
        concurrency = self.tried(options)
        if concurrency is None or concurrency < self.target:
            return None
        return TargetAnswer(name=name, options={**options, **self._more_seats()}, concurrency=concurrency, **counts)

    def memories(self) -> Iterator[TargetAnswer]:
        """Return the least memory for each KV dtype, in whole MiB."""
        for dtype in dict.fromkeys((self.base.kv_dtype, "int8", "int4")):
            found = self._least_memory(dtype)
            if found is not None:
                yield found

    def _least_memory(self, dtype: str) -> TargetAnswer | None:
        options = {} if dtype == self.base.kv_dtype else {"kv_cache_dtype": dtype}
        try:
            changed = with_options(self.question, {**options, **self._more_seats()})
            roomy = self.sizer.size(replace(changed, memory=2**50, num_blocks=None, kv_cache_memory=None))
        except (InvalidParameterError, CapacityError):
            return None
        spent = roomy.weights.value_bytes + roomy.activation.value_bytes + roomy.overhead.value_bytes
        if not roomy.num_blocks or not self.concurrency(roomy):
            return None
        # Blocks are proportional to requests; what prefixes share comes off both, so a search by halves is exact.
        low, high = 0, roomy.num_blocks
        while high - low > 1:
            middle = (low + high) // 2
            if self.concurrency(replace(roomy, num_blocks=middle)) >= self.target:
                high = middle
            else:
                low = middle
        share = self.question.utilization or 0.9
        memory = int((spent + (high + 1) * roomy.kv.block_bytes) / share) // MIB + 1
        name = f"{memory / 1024:,.1f} GiB of memory, KV cache as {dtype}"
        if self.question.num_blocks is not None or self.question.kv_cache_memory is not None:
            changed = replace(self.question, num_blocks=None, kv_cache_memory=None)
            return _Search(self.sizer, changed, self.base, self.lengths, self.target).answer(
                name, {**options, "memory": f"{memory}MiB"}
            )
        return self.answer(name, {**options, "memory": f"{memory}MiB"})

    def own_device(self) -> Iterator[TargetAnswer]:
        """Return the fewest of the asked devices, and smaller KV dtypes that need fewer still."""
        stages = ranks(self.question)[1]
        fewest = max(_RANKS) * stages + 1
        for dtype in dict.fromkeys((self.base.kv_dtype, *_SMALLER_DTYPES)):
            found = self._fewest(stages, {} if dtype == self.base.kv_dtype else {"kv_cache_dtype": dtype}, dtype)
            if found is not None and found.num_devices < fewest:
                fewest = found.num_devices
                yield found

    def _fewest(self, stages: int, options: dict[str, str], dtype: str) -> TargetAnswer | None:
        for tensor in _RANKS:
            num_devices = tensor * stages
            name = f"{num_devices} of this device, KV cache as {dtype}"
            is_same = (tensor, stages) == ranks(self.question)
            size = {} if is_same else rank_options(self.question, tensor, stages)
            found = self.answer(name, {**options, **size}, num_devices=num_devices)
            if found is not None:
                return found
        return None

    def copies(self) -> Iterator[TargetAnswer]:
        """Return how many copies of the plan as it stands would hold them together."""
        own = self.concurrency(self.base)
        if not self.base.fits or own < 1 or own >= self.target:
            return
        # A request lives on one copy, so only whole ones count.
        num_copies = -(-self.target // int(own))
        tensor, stages = ranks(self.question)
        yield TargetAnswer(
            name=f"{num_copies} copies of this plan",
            options={},
            num_devices=tensor * stages,
            num_copies=num_copies,
            concurrency=float(num_copies * int(own)),
        )

    def other_devices(self) -> Iterator[TargetAnswer]:
        """Return the fewest of other devices, least total memory first."""
        found = []
        for device in list_devices():
            if device.kind != "gpu" or device.id == self.question.device:
                continue
            changed = replace(self.question, device=device.id, memory=None, pipeline_parallel_size=None)
            search = _Search(self.sizer, changed, self.base, self.lengths, self.target)
            for tensor in _RANKS[:4]:
                size = {} if (tensor, 1) == ranks(self.question) else rank_options(self.question, tensor, 1)
                options = {"device": device.id, **size}
                answer = search.answer(f"{tensor} x {device.name}", options, num_devices=tensor)
                if answer is not None:
                    found.append((tensor * device.memory_bytes, answer))
                    break
        yield from (answer for _, answer in sorted(found, key=lambda each: each[0])[:_MAX_OTHER_DEVICES])
