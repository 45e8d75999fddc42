"""Structured output through AsyncLLM: a grammar that takes long to compile holds up nobody but its own request."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError
from octavo.testing.async_rig import AsyncRig, message
from octavo.testing.factories import CoreSetup

DEADLINE_S = 60.0
END = 9


class OneToken:
    """Allows the token 5, then the end."""

    def __init__(self) -> None:
        self._num_taken = 0

    def allowed_tokens(self) -> bytes:
        mask = bytearray(4 * -(-CoreSetup().vocab_size // 32))
        allowed = END if self._num_taken else 5
        mask[allowed // 8] |= 1 << allowed % 8
        return bytes(mask)

    def accept(self, token_id: int) -> None:
        self._num_taken += 1

    def start(self) -> OneToken:
        return OneToken()


class SlowCompiler:
    """Compiles when a test says so."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.threads: list[str] = []

    def compile(self, structured: StructuredOutput) -> OneToken:
        self.threads.append(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_end.wait(DEADLINE_S)
        if structured.value == "bad":
            raise InvalidParameterError("cannot be followed", param="structured")
        return OneToken()


def rig_with(compiler: SlowCompiler) -> AsyncRig:
    rig = AsyncRig()
    rig.engine._grammars = compiler
    rig.engine._eos_token_ids = (END,)
    return rig


def held(request_id: str, value: str = "good"):
    return message(request_id, structured=StructuredOutput(kind="regex", value=value), max_tokens=8)


def test_others_are_answered_while_a_grammar_compiles() -> None:
    async def story() -> None:
        compiler = SlowCompiler()
        async with rig_with(compiler) as rig:
            slow = asyncio.create_task(rig.answer(held("slow")))
            assert await asyncio.to_thread(compiler.has_begun.wait, DEADLINE_S)

            for index in range(3):
                assert await rig.answer(message(f"quick{index}", max_tokens=4))
            assert not slow.done()

            compiler.may_end.set()
            assert await slow == {0: ([5, END], "5 9 ", "stop")}
            await rig.at_rest()
        assert len(compiler.threads) == 1, "compiled once, and not again by the engine"
        assert "grammar" in compiler.threads[0]

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_a_grammar_that_is_refused_reaches_the_caller_and_nobody_else() -> None:
    async def story() -> None:
        compiler = SlowCompiler()
        compiler.may_end.set()
        async with rig_with(compiler) as rig:
            with pytest.raises(InvalidParameterError, match="cannot be followed"):
                await rig.llm.submit(held("a", "bad"))
            assert await rig.answer(message("a", max_tokens=4)), "the id is free"
            await rig.at_rest()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_a_caller_who_leaves_while_the_grammar_compiles_leaves_nothing() -> None:
    async def story() -> None:
        compiler = SlowCompiler()
        async with rig_with(compiler) as rig:
            task = asyncio.create_task(rig.llm.submit(held("a")))
            assert await asyncio.to_thread(compiler.has_begun.wait, DEADLINE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            compiler.may_end.set()
            assert await rig.answer(message("b", max_tokens=4))
            await rig.at_rest()
            assert "a" not in {getattr(event, "request_id", None) for event in rig.events}

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
