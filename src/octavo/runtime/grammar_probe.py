"""GrammarProbe: tries a grammar out in a process of its own, before it is compiled in this one.

A compiler of grammars is a large program that strangers write programs for. There are short schemas that keep it busy
for hours, and chains of rules that overflow its stack, which no limit of its own catches and no handler survives. So a
server lets another process go first: it gets so much processor time, memory and stack, and what kills it is refused.

    check(source) ──> probe process ──> "" or what is wrong        stays for the next grammar
                           └── dies of its limits ──> refused      another is started when it is needed

Run as a program, this file is that process; it needs llguidance and the standard library alone.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import IO, Any

CPU_LIMIT_S = 2.0
"""Processor time to try one grammar; an object of 3,000 properties takes about half of it."""
MEMORY_LIMIT_BYTES = 4 << 30
STACK_BYTES = 1 << 20
"""Less than any thread that compiles has, so that what was survived here is survived there."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
}
"""At these the worst grammar found holds 11 MB; 10,000 choices and an object of 3,000 properties still compile."""
WAIT_S = 120.0
_KILLED_BY = {
    signal.SIGPROF: f"it takes more than {CPU_LIMIT_S:g} s to compile",
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGABRT: "it takes too much memory, or is nested too deeply",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpelledVocabulary:
    """What a compiler of grammars needs to know of a vocabulary.

    Args:
        tokens: The bytes of each id.
        special_token_ids: Ids that are never text.
        eos_token_ids: Ids that end one.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


class GrammarProbe:
    """Owns the process. Not thread-safe: one grammar is tried at a time.

    Args:
        vocabulary: Handed to each process once.
    """

    def __init__(self, vocabulary: SpelledVocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._ender: weakref.finalize[..., GrammarProbe] | None = None

    def check(self, source: str) -> str:
        """Return what is wrong with a grammar; empty if it compiles and a text of it can begin."""
        if self._process is not None and self._process.poll() is not None:
            self._bury(self._process)  # somebody else ended it, while it had nothing to do
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            _send(process.stdin, source.encode())
            if select.select([process.stdout], [], [], WAIT_S)[0]:
                answer = _receive(process.stdout)
                if answer is not None:
                    return answer.decode()
        return self._bury(process)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the folder of this file is no place to import from. A session of its own: Ctrl-C is for the caller.
        process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process, self._ender = process, weakref.finalize(self, _end, process)
        assert process.stdin is not None
        one = self._vocabulary
        fields = (one.tokens, one.special_token_ids, one.eos_token_ids, one.bos_token_id)
        _send(process.stdin, pickle.dumps(fields))
        return process

    def _bury(self, process: subprocess.Popen[bytes]) -> str:
        """Take leave of a process that did not answer, and say why it did not."""
        assert self._ender is not None
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
        self._ender()
        self._process = None
        killed_by = -process.returncode
        return next((said for number, said in _KILLED_BY.items() if number == killed_by), "it cannot be compiled")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was still to be written is of no use any more
                pipe.close()


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; `None` when the other side has gone."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    data: bytes = pipe.read(struct.unpack("<Q", head)[0])
    return data


# ---- the process -----------------------------------------------------------------------------------------------------


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until the caller is gone."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - only here

    class Spelled:
        def __init__(self, fields: tuple[list[bytes], list[int], list[int], int | None]) -> None:
            self.tokens, self.special_token_ids, self.eos_token_ids, self.bos_token_id = fields
            self.eos_token_id = self.eos_token_ids[0]

        def __call__(self, text: str) -> list[int]:
            # Asked where a grammar leaves only one text; what tokens it is made of changes nothing here.
            return tokenizer.greedy_tokenize(text)

    first = _receive(requests)
    if first is None:
        return
    spelled = Spelled(pickle.loads(first))  # noqa: S301 - from the process that started this one
    tokenizer = LLTokenizer(
        TokenizerWrapper(spelled), n_vocab=len(spelled.tokens), eos_token=list(spelled.eos_token_ids)
    )
    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    # The first mask of all prepares what later ones share; that is not the first grammar's doing.
    LLMatcher(tokenizer, LLMatcher.grammar_from_regex("a"), log_level=0, limits=limits).compute_bitmask()
    while (request := _receive(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        matcher = LLMatcher(tokenizer, request.decode(), log_level=0, limits=limits)
        matcher.compute_bitmask()
        error = matcher.get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, error.encode())


def main() -> None:
    """Run as the process, in a thread whose stack is small."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not every system limits this
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
