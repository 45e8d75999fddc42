"""A load on an OpenAI-compatible server: when each request of a workload is sent, and what came back. No printing.

Open loop: requests are sent when they are due, whether or not earlier ones are done, as people do who do not know of
each other. Times are those of the client: what a person would have waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from octavo.errors import InvalidParameterError, MachineError
from octavo.llm.http_stream import Endpoint, StreamBrokenError, StreamedAnswer, bearer, open_stream
from octavo.llm.offline_bench import WorkloadRequest

_BROKEN = (OSError, StreamBrokenError, asyncio.IncompleteReadError)

OnProgress = Callable[[int, int], None]
"""Called with the requests done and in all, after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and how it takes requests (see `probe`).

    Args:
        prompts_as: `token ids`, or `text` where a server refuses ids.
        takes_ignore_eos: Whether answers can be forced to their length.
        texts: The prompts as text, in the order of the workload; empty unless needed.
    """

    endpoint: Endpoint
    model: str
    api_key: str | None = None
    prompts_as: str = "token ids"
    takes_ignore_eos: bool = True
    texts: tuple[str, ...] = ()

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **bearer(self.api_key)}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one request came to; times in seconds since the load began.

    Args:
        due_s: When it should have been sent.
        sent_s: When it was: later if the client was busy or had too many in flight.
        chunk_s: When text arrived.
        error: What went wrong, as a kind that can be counted; `None` for an answer.
    """

    due_s: float
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


def arrivals(workload: Sequence[WorkloadRequest], *, request_rate: float | None, seed: int) -> list[float]:
    """Return when each request is due, in seconds from the start.

    Args:
        request_rate: Mean requests per second of a Poisson process; `None` takes the workload's own arrivals, and
            sends those that have none at once.
    """
    if request_rate is None:
        return [one.arrival_s for one in workload]
    random = Random(seed)
    due_s, times = 0.0, []
    for _ in workload:
        times.append(due_s)
        due_s += random.expovariate(request_rate)
    return times


async def list_models(target: Target) -> list[str]:
    """Return the names under which the server serves.

    Raises:
        MachineError: it cannot be reached, or does not answer as an OpenAI-compatible server.
    """
    try:
        async with open_stream("GET", target.endpoint, "/models", headers=target.headers()) as answer:
            status, body = answer.status, await answer.read()
    except _BROKEN as error:
        raise MachineError(
            f"no server answers at {target.endpoint.host_header}",
            because=str(error),
            hints=("`octavo serve` starts one at http://127.0.0.1:8000/v1",),
        ) from error
    names: list[Any] | None = None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        names = [one["id"] for one in json.loads(body)["data"]]
    if status != 200 or names is None or not all(isinstance(name, str) for name in names):
        raise MachineError(
            f"{target.endpoint.host_header}{target.endpoint.path}/models is no list of models (status {status})",
            because=_error_words(body),
            hints=_key_hint(status),
        )
    return names


async def send(
    target: Target, request: WorkloadRequest, outcome: Outcome, *, index: int, start_s: float, timeout_s: float
) -> None:
    """Send one request, read its stream, and write down what happened; raises nothing that a server can cause."""
    prompt: Any = target.texts[index] if target.prompts_as == "text" else list(request.prompt_token_ids)
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if target.takes_ignore_eos else {}),
    }
    outcome.sent_s = time.perf_counter() - start_s
    try:
        async with (
            asyncio.timeout(timeout_s),
            open_stream(
                "POST", target.endpoint, "/completions", headers=target.headers(), body=json.dumps(body).encode()
            ) as answer,
        ):
            if answer.status != 200:
                outcome.error = f"http {answer.status}"
            else:
                await _read_stream(answer, outcome, start_s)
    except TimeoutError:
        outcome.error = "timeout"
    except (StreamBrokenError, asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        outcome.error = "cut short"
    except OSError:
        outcome.error = "no connection"
    except (ValueError, KeyError, TypeError, AttributeError):
        outcome.error = "not an OpenAI stream"
    outcome.done_s = time.perf_counter() - start_s


async def _read_stream(answer: StreamedAnswer, outcome: Outcome, start_s: float) -> None:
    is_done, num_chunks = False, 0
    async for line in answer.lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            is_done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            outcome.error = "error in the stream"
            return
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            outcome.chunk_s.append(time.perf_counter() - start_s)
            num_chunks += 1
        usage = chunk.get("usage")
        if usage:
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not is_done:
        outcome.error = "cut short"
    outcome.output_tokens = outcome.output_tokens or num_chunks


async def probe(
    target: Target, workload: Sequence[WorkloadRequest], spell: Callable[[Sequence[int]], str] | None
) -> Target:
    """Find out with one-token requests how the server takes prompts, and return a target that does it that way.

    Args:
        spell: Turns token ids into text for a server that takes no ids; `None` where that is not possible.

    Raises:
        MachineError: it takes none of the ways; says what it answered to the first.
        InvalidParameterError: it takes only text, and there is none.
    """
    short = WorkloadRequest(prompt_token_ids=workload[0].prompt_token_ids[:1], max_tokens=1)
    first_words, status = "", 0
    for prompts_as in ("token ids", "text"):
        if prompts_as == "text" and spell is None:
            continue
        for takes_ignore_eos in (True, False):
            texts = () if spell is None or prompts_as != "text" else (spell(short.prompt_token_ids),)
            tried = replace(target, prompts_as=prompts_as, takes_ignore_eos=takes_ignore_eos, texts=texts)
            status, words = await _try(tried, short)
            first_words = first_words or words
            if status == 200:
                return _with_texts(tried, workload, spell)
            if status not in (400, 422):
                raise MachineError(f"the server answers {status}", because=words, hints=_key_hint(status))
    raise InvalidParameterError(
        f"the server refuses the workload's prompts ({status})",
        param="--workload",
        because=first_words,
        hints=("`--tokenizer smollm2-135m` sends them as text, spelled by that model's tokenizer",)
        if spell is None
        else (),
    )


def _with_texts(
    target: Target, workload: Sequence[WorkloadRequest], spell: Callable[[Sequence[int]], str] | None
) -> Target:
    if target.prompts_as != "text":
        return target
    assert spell is not None
    return replace(target, texts=tuple(spell(one.prompt_token_ids) for one in workload))


async def _try(target: Target, request: WorkloadRequest) -> tuple[int, str]:
    body = {
        "model": target.model,
        "prompt": target.texts[0] if target.prompts_as == "text" else list(request.prompt_token_ids),
        "max_tokens": 1,
        **({"ignore_eos": True} if target.takes_ignore_eos else {}),
    }
    try:
        async with open_stream(
            "POST", target.endpoint, "/completions", headers=target.headers(), body=json.dumps(body).encode()
        ) as answer:
            return answer.status, _error_words(await answer.read())
    except _BROKEN as error:
        raise MachineError(f"{target.endpoint.host_header} does not answer", because=str(error)) from error


async def run_load(
    target: Target,
    workload: Sequence[WorkloadRequest],
    due_s: Sequence[float],
    *,
    max_concurrency: int | None,
    timeout_s: float,
    on_progress: OnProgress | None = None,
) -> list[Outcome]:
    """Send a workload and wait for every answer.

    Args:
        due_s: When each request is due, from `arrivals`.
        max_concurrency: Most requests in flight; more wait here, and their `sent_s` says so.
        timeout_s: Longest that one may take once it is sent.
    """
    seats = asyncio.Semaphore(max_concurrency or len(workload))
    outcomes = [Outcome(due_s=due) for due in due_s]
    num_done = 0
    start_s = time.perf_counter()

    async def one(index: int) -> None:
        nonlocal num_done
        await asyncio.sleep(max(0.0, due_s[index] - (time.perf_counter() - start_s)))
        async with seats:
            await send(target, workload[index], outcomes[index], index=index, start_s=start_s, timeout_s=timeout_s)
        num_done += 1
        if on_progress is not None:
            on_progress(num_done, len(workload))

    async with asyncio.TaskGroup() as group:
        for index in range(len(workload)):
            group.create_task(one(index))
    return outcomes


def _error_words(body: bytes) -> str:
    """Return what an error body says, shortened."""
    try:
        error = json.loads(body)["error"]
        words = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        words = body.decode("utf-8", "replace")
    return " ".join(str(words).split())[:300]


def _key_hint(status: int) -> tuple[str, ...]:
    return ("give the server's key with `--api-key` or OCTAVO_API_KEY",) if status in (401, 403) else ()
