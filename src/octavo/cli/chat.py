"""`octavo chat`: talk with a model, turn by turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, engine_options, output_options
from octavo.cli.sampling_options import sampling_options
from octavo.config.sources import AskedConfig
from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError, ModelFileError, OctavoError

if TYPE_CHECKING:
    from octavo.llm.offline import LLM

DEFAULT_MAX_TOKENS = 512
_HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn came to. Cached tokens are those of the prompt that the prefix cache already held."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    output_tokens_per_s: float | None

    def summary(self) -> str:
        rate = "" if self.output_tokens_per_s is None else f", {self.output_tokens_per_s:.1f} tokens/s"
        return (
            f"{self.completion_tokens:,} tokens{rate}, first after {self.ttft_s:.2f} s;"
            f" {self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens from the prefix cache"
        )


@click.command(
    "chat",
    cls=OctavoCommand,
    examples=(
        "octavo chat",
        "octavo chat --system 'You answer in one sentence.' --temperature 0.7",
        "echo 'What is a KV cache?' | octavo chat --json",
    ),
)
@click.option("--system", cls=GroupedOption, group="Prompt", metavar="TEXT", help="What the assistant is told first")
@sampling_options(max_tokens=DEFAULT_MAX_TOKENS)
@engine_options
@output_options
def command(system: str | None, params: SamplingParams, asked: AskedConfig, output: Output) -> None:
    """Talk with a model, turn by turn.

    Each line of stdin is a message. Every turn says how much of its prompt was still in the prefix cache: the whole
    conversation so far, as long as the pool holds it. With `--json` each turn is one line of JSON.
    """
    from octavo.cli.render import progress_bars
    from octavo.llm.offline import LLM

    if params.n != 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise InvalidParameterError(
            "a chat has one answer a turn, and shows its text only",
            param="--logprobs" if params.n == 1 else "-n",
            hints=("`octavo generate --chat --json` has -n and --logprobs",),
        )
    with progress_bars(output) as progress:
        llm = LLM(asked.config, progress=progress)
    if llm.tokenizer.chat_template is None:
        raise ModelFileError("the model has no chat template", hints=("`octavo generate` continues plain text",))
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for line in _read_lines(output):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        turn = _take_turn(llm, messages, replace(params, seed=asked.config.seed), output)
        if turn is None:
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": turn.text})
        _report(turn, output)


def _read_lines(output: Output) -> Iterator[str]:
    """Yield what the person says; ends at the end of input, or at Ctrl-C where nothing is being answered."""
    is_person = sys.stdin.isatty() and not output.is_json
    if is_person and not output.is_quiet:
        click.echo(_HELP, err=True)
    while True:
        if is_person:
            click.echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidParameterError("a message is not text", param="stdin", because=str(error)) from error
        if not line:
            return
        if line.strip():
            yield line.strip()


def _take_turn(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, output: Output) -> Turn | None:
    """Answer the conversation, streaming; `None` if it was refused (it is too long) or stopped before a token."""
    start_s = time.perf_counter()
    first_s = last_s = start_s
    text, finish_reason, num_tokens, num_cached = "", None, 0, 0
    stream = llm.stream_chat(messages, params)
    try:
        for delta in stream:
            last_s = time.perf_counter()
            first_s = last_s if num_tokens == 0 else first_s
            num_tokens += len(delta.token_ids)
            num_cached = delta.num_cached_tokens
            text += delta.text
            finish_reason = delta.finish_reason or finish_reason
            if not output.is_json:
                click.echo(delta.text, nl=False)
                sys.stdout.flush()
    except OctavoError as error:
        if output.is_json:
            # One line per message, also for one that is refused: whoever sent it waits for an answer.
            click.echo(json.dumps({"schema": "octavo.error/1", "error": {"code": error.code, "message": str(error)}}))
        click.echo(error.render(), err=True)
        return None
    except KeyboardInterrupt:
        stream.close()
        finish_reason = "abort"
    if num_tokens == 0:
        return None
    if not output.is_json:
        click.echo()
    return Turn(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=len(stream.prompts[0].token_ids),
        cached_tokens=num_cached,
        completion_tokens=num_tokens,
        ttft_s=first_s - start_s,
        output_tokens_per_s=(num_tokens - 1) / (last_s - first_s) if num_tokens > 1 else None,
    )


def _report(turn: Turn, output: Output) -> None:
    if output.is_json:
        click.echo(json.dumps({"schema": "octavo.chat/1", **asdict(turn)}, ensure_ascii=False))
    elif not output.is_quiet:
        click.echo(click.style(f"({turn.summary()})", dim=True), err=True)
