"""An AsyncLLM whose answers are written beforehand, and a server around it in this process.

The engine, the scheduler and the tokenizer are real; only the runner is not (`FakeRunner`, which also checks every
block it is told to read). For what a tiny random model cannot be relied on to say: a tool call, an emoji, an early end.

    with LocalServer(scripted_llm(folder, script=lambda index: "Hello!")) as server:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn

from octavo.config.engine import EngineConfig
from octavo.core.events import EventLog
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampledToken, SampleRow, StepPlan, StepResult, TokenLogprobs
from octavo.engine.clock import MonotonicClock
from octavo.engine.engine import Engine
from octavo.llm.assemble import assemble
from octavo.llm.async_llm import AsyncLLM
from octavo.server.app import create_app
from octavo.server.lifecycle import web_config
from octavo.server.settings import ServerSettings
from octavo.testing.fake_runner import FakeRunner
from octavo.units import TokenId

Script = Callable[[int], str | Sequence[int]]
"""Returns the answer number i (from 0, in the order in which answers begin): a text, or token ids."""
WAIT_S = 30.0


class GatedRunner(FakeRunner):
    """A FakeRunner that stops before each step until it is let through, and fails when told to.

    Args:
        gate: Set lets steps through.
    """

    def __init__(self, *, gate: threading.Event, num_blocks: int, block_size: int, script: Script, eos: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, choose=self._choose_scripted)
        self.gate = gate
        self.failure: Exception | None = None
        self.pause_s = 0.0
        self._script = script
        self._eos = eos
        self._answers: dict[str, tuple[int, Sequence[int]]] = {}
        self.encode: Callable[[str], Sequence[int]] = lambda _text: ()

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        if self.pause_s:
            time.sleep(self.pause_s)
        if self.failure is not None:
            raise self.failure
        result = super().execute(plan)
        samples = [_scored(sample, row) for sample, row in zip(result.samples, plan.samples, strict=True)]
        return replace(result, samples=tuple(samples))

    def _choose_scripted(self, row: SampleRow, _history: Sequence[int]) -> int:
        if row.request_id not in self._answers:
            said = self._script(len(self._answers))
            ids = self.encode(said) if isinstance(said, str) else said
            self._answers[row.request_id] = (row.position, [*ids, self._eos])
        start, ids = self._answers[row.request_id]
        return ids[min(row.position - start, len(ids) - 1)]


def _scored(sample: SampledToken, row: SampleRow) -> SampledToken:
    """Score a token at -0.5, and the ids after it as impossible, as masks make them."""
    if sample.logprobs is None or row.params.logprobs is None:
        return sample
    others = [(TokenId(sample.token_id + i), -math.inf) for i in range(1, row.params.logprobs)]
    top = tuple([(sample.token_id, -0.5), *others][: row.params.logprobs])
    return replace(sample, logprobs=TokenLogprobs(token_id=sample.token_id, logprob=-0.5, rank=1, top=top))


class ScriptedLLM(AsyncLLM):
    """An AsyncLLM with its runner in reach."""

    runner: GatedRunner


def scripted_llm(
    folder: str | Path,
    script: Script,
    *,
    num_blocks: int = 64,
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    max_waiting: int = 64,
    stall_s: float = 10.0,
) -> ScriptedLLM:
    """Make an engine that answers by a script, with the tokenizer of a tiny model's folder."""
    parts = assemble(
        EngineConfig(model=str(folder), num_blocks=num_blocks, max_model_len=max_model_len, threads=1),
        purpose="serving",
    )
    gate = threading.Event()
    gate.set()
    tokenizer = parts.tokenizer
    eos = tokenizer.eos_token_ids[0]
    runner = GatedRunner(gate=gate, num_blocks=num_blocks, block_size=16, script=script, eos=eos)
    runner.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    events = EventLog()
    scheduler = Scheduler(
        PagedKVCache(num_blocks, 16, max_chunk_tokens=64, is_caching=True, events=events),
        Limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        events=events,
    )
    engine = Engine(
        scheduler,
        runner,
        events=events,
        clock=MonotonicClock(),
        vocab_size=parts.model.spec.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        tokenizer=tokenizer,
    )
    llm = ScriptedLLM.from_parts(replace(parts, engine=engine), max_waiting=max_waiting, stall_s=stall_s)
    assert isinstance(llm, ScriptedLLM)
    llm.runner = runner
    return llm


class LocalServer:
    """A server in a thread of this process: real sockets, an engine in reach.

    Args:
        llm: Started and stopped here.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings | None = None) -> None:
        self.llm = llm
        self.settings = settings or ServerSettings(enable_operator=True)
        self.url = ""

    def __enter__(self) -> Self:
        self.llm.start()
        self._server = uvicorn.Server(web_config(create_app(self.llm, self.settings), self.settings))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + WAIT_S
        while not self._server.started:
            assert time.monotonic() < deadline_s and self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def connections(self) -> Sequence[object]:
        """Those that the server has open."""
        return list(self._server.server_state.connections)

    async def _serve(self) -> None:
        self._server.config.host, self._server.config.port = "127.0.0.1", 0
        await self._server.serve()
        await self.llm.stop()
