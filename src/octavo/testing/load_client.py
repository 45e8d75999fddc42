"""Clients that put a load on a server and hear everything it says to them, the end above all.

    heard = await send_all(url, asks)          # open loop: each is sent when it is due
    {each.fate for each in heard}

A request is lost if its client cannot tell how it ended. All other ends are told: an answer that is whole, a refusal,
an abort in the stream, or the client's own leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from octavo.llm.http_stream import Endpoint, StreamBrokenError, StreamedAnswer, open_stream, parse_url

Fate = Literal["answered", "refused", "aborted", "left", "lost"]
LONGEST_S = 300.0
"""After which a client calls its request lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to come.

    Args:
        body: Sent as JSON.
        path: Below the server's address.
        due_s: When it is sent, from the start of the load.
        leaves_after_s: How long the client stays once it has connected; `None` stays until the end.
        leaves_after_pieces: After how many pieces of a stream's text the client leaves, however fast they come; `None`
            stays until the end.
        headers: Besides those every request has.
    """

    body: dict[str, Any]
    path: str = "/v1/completions"
    due_s: float = 0.0
    leaves_after_s: float | None = None
    leaves_after_pieces: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Heard:
    """What one client heard; times in seconds from the start of the load.

    Args:
        scores: Log-probabilities of the answer's tokens, where they were asked for.
        chunk_s: When each piece of text came.
        why: What came instead of an answer.
    """

    fate: Fate = "lost"
    status: int = 0
    request_id: str | None = None
    text: str = ""
    scores: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_comments: int = 0
    num_tokens: int = 0
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    why: str = ""


async def send_all(
    url: str, asks: Sequence[Ask], *, max_in_flight: int | None = None, on_done: Callable[[Heard], None] | None = None
) -> list[Heard]:
    """Send every request when it is due, or when there is a seat, and hear them all to their ends.

    Args:
        max_in_flight: Most at a time; `None` is no limit.
        on_done: Called with each as it ends.
    """
    endpoint = parse_url(url)
    seats = asyncio.Semaphore(max_in_flight or max(1, len(asks)))
    start_s = time.perf_counter()

    async def one(ask: Ask) -> Heard:
        await asyncio.sleep(ask.due_s - (time.perf_counter() - start_s))
        async with seats:
            heard = await hear(endpoint, ask, start_s=start_s)
        if on_done is not None:
            on_done(heard)
        return heard

    return list(await asyncio.gather(*map(one, asks)))


async def hear(endpoint: Endpoint, ask: Ask, *, start_s: float) -> Heard:
    """Send one request and listen to its end; raises nothing that a server can cause."""
    heard = Heard(sent_s=time.perf_counter() - start_s)
    stays_s = LONGEST_S if ask.leaves_after_s is None else ask.leaves_after_s
    try:
        async with asyncio.timeout(stays_s):
            await _exchange(endpoint, ask, heard, start_s)
    except TimeoutError:
        heard.fate, heard.why = ("lost", f"no end in {stays_s} s") if ask.leaves_after_s is None else ("left", "")
    except (StreamBrokenError, asyncio.IncompleteReadError, OSError, ValueError) as error:
        heard.why = repr(error)
    heard.done_s = time.perf_counter() - start_s
    return heard


async def _exchange(endpoint: Endpoint, ask: Ask, heard: Heard, start_s: float) -> None:
    headers = {"Content-Type": "application/json", **ask.headers}
    body = json.dumps(ask.body).encode()
    async with open_stream("POST", endpoint, ask.path, headers=headers, body=body) as answer:
        heard.status = answer.status
        heard.request_id = answer.headers.get("x-request-id")
        if answer.status != 200:
            heard.why = json.loads(await answer.read())["error"]["message"]
            heard.fate = "refused"
        elif ask.body.get("stream"):
            await _listen(answer, ask, heard, start_s)
        else:
            _take(json.loads(await answer.read()), heard)
            heard.chunk_s.append(time.perf_counter() - start_s)
            heard.fate = "answered"


async def _listen(answer: StreamedAnswer, ask: Ask, heard: Heard, start_s: float) -> None:
    heard.why = "the stream ended in silence"
    async for line in answer.lines():
        heard.num_comments += line.startswith(":")
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            heard.fate, heard.why = "answered", ""
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            heard.fate, heard.why = "aborted", chunk["error"]["message"]
        elif _take(chunk, heard):
            heard.chunk_s.append(time.perf_counter() - start_s)
            if len(heard.chunk_s) == ask.leaves_after_pieces:
                heard.fate, heard.why = "left", ""
                return


def _take(said: dict[str, Any], heard: Heard) -> bool:
    """Add a chunk, or a whole answer, to what has been heard; return whether it had text."""
    has_text = False
    for choice in said["choices"]:
        text = choice["text"] if "text" in choice else choice.get("delta", choice.get("message", {})).get("content")
        heard.text += text or ""
        has_text = has_text or bool(text)
        scores = choice.get("logprobs")
        if scores and "token_logprobs" in scores:
            heard.scores += scores["token_logprobs"]
    usage = said.get("usage")
    if usage:
        heard.num_tokens = usage["completion_tokens"]
        heard.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return has_text


def poisson(count: int, *, rate_per_s: float, seed: int) -> list[float]:
    """Return arrivals of a Poisson process, the first at 0."""
    random = Random(seed)
    times, due_s = [], 0.0
    for _ in range(count):
        times.append(due_s)
        due_s += random.expovariate(rate_per_s)
    return times


async def get(url: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a GET; status 0 where nobody answers."""
    with contextlib.suppress(OSError, StreamBrokenError, asyncio.IncompleteReadError):
        async with open_stream("GET", parse_url(url), path, headers=headers or {}) as answer:
            return answer.status, await answer.read()
    return 0, b""
