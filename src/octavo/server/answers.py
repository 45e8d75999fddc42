"""Answers: the deltas of all requests that one HTTP request made, as they come, and what they add up to.

answers = await Answers.start(llm, messages)     # raises if any is refused; then none is left behind
async for prompt_index, delta in answers: ...
answers.close()                                  # always: ends what is not done
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.errors import RequestAbortedError
from octavo.llm.answer_stream import AnswerStream
from octavo.llm.async_llm import AsyncLLM
from octavo.server.errors import ApiError

T = TypeVar("T")
_Item = tuple[int, OutputDelta | None, BaseException | None]


class Answers:
    """Deltas of several requests, each with the place of its prompt."""

    def __init__(self, streams: Sequence[AnswerStream]) -> None:
        self._streams = streams
        self._pumps: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, llm: AsyncLLM, messages: Sequence[EngineRequest]) -> Answers:
        """Hand requests to the engine, all or none.

        Raises:
            OctavoError: the engine refused one.
        """
        # At once and not one after the other: the engine looks at arrivals once a step.
        starting = [asyncio.ensure_future(llm.submit(message)) for message in messages]
        try:
            streams = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            for started in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(started, AnswerStream):
                    started.close()
            raise
        return cls(streams)

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, _checked(delta)
            return
        # One place each: a slow reader holds up the pumps, and the engine's side joins what comes meanwhile.
        items: asyncio.Queue[_Item] = asyncio.Queue(len(self._streams))
        self._pumps = [asyncio.create_task(_pump(index, stream, items)) for index, stream in enumerate(self._streams)]
        num_left = len(self._pumps)
        while num_left:
            index, came, error = await items.get()
            if error is not None:
                raise error
            if came is None:
                num_left -= 1
            else:
                yield index, _checked(came)

    def close(self) -> None:
        """End what is not done; its blocks are free within one step."""
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.close()


async def _pump(index: int, stream: AnswerStream, items: asyncio.Queue[_Item]) -> None:
    try:
        async for delta in stream:
            await items.put((index, delta, None))
    except Exception as error:  # noqa: BLE001 - it belongs to whoever reads the queue
        await items.put((index, None, error))
    else:
        await items.put((index, None, None))


def _checked(delta: OutputDelta) -> OutputDelta:
    """Return a delta, unless it is an end that is no answer."""
    if delta.finish_reason == "abort":
        raise RequestAbortedError("the request was ended before its answer was", because="somebody aborted it")
    if delta.finish_reason == "error":
        raise ApiError(500, "the engine failed in a step of this request", code="request-failed")
    return delta


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: each prompt once, the tokens of all answers together."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def take(self, prompt_index: int, delta: OutputDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.index == 0:  # further answers share the prompt with the first
            self.cached_tokens[prompt_index] = delta.num_cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do work for a client, and stop as soon as it has gone.

    Raises:
        ClientDisconnect: it has gone; nobody reads what is answered.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        for task in (doing, leaving):
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


async def until_gone(request: Request) -> None:
    """Wait until the client has gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
