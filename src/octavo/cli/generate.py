"""`octavo generate`: answer prompts, streaming to the terminal."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.event_file import EventFile
from octavo.cli.options import GroupedOption, Output, engine_options, output_options
from octavo.cli.sampling_options import sampling_options
from octavo.config.sources import AskedConfig
from octavo.config.text_file import read_text_file, read_text_stream
from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError, ModelFileError
from octavo.units import MIB

if TYPE_CHECKING:
    from octavo.engine.messages import OutputDelta
    from octavo.llm.offline import LLM, Stream

DEFAULT_MAX_TOKENS = 256
MAX_PROMPT_BYTES = 64 * MIB


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One answer, put together from its deltas."""

    prompt_index: int
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@click.command(
    "generate",
    cls=OctavoCommand,
    examples=(
        "octavo generate -p 'The capital of France is'",
        "octavo generate --chat -p 'What is a KV cache?' --max-tokens 100",
        "octavo generate -p 'Once' -p 'Twice' -n 2 --temperature 0.8 --seed 1 --show-kv",
        "octavo generate ./model.gguf --prompt-file prompt.txt --json",
        "echo 'Once upon a time' | octavo generate --prompt-file -",
    ),
)
@click.option("-p", "--prompt", "texts", cls=GroupedOption, group="Prompt", multiple=True, metavar="TEXT",
              help="A prompt; repeatable, all run together")  # fmt: skip
@click.option("--prompt-file", "files", cls=GroupedOption, group="Prompt", multiple=True, metavar="FILE",
              help="A file whose whole text is a prompt, - for stdin; repeatable")  # fmt: skip
@click.option("--chat", "is_chat", cls=GroupedOption, group="Prompt", is_flag=True,
              help="Take each prompt as a message to an assistant, by the model's chat template")  # fmt: skip
@sampling_options(max_tokens=DEFAULT_MAX_TOKENS)
@engine_options
@click.option("--show-kv", is_flag=True, cls=GroupedOption, group="Output",
              help="Draw every request's blocks, live, from the allocator itself")  # fmt: skip
@click.option("--record-events", "events_path", cls=GroupedOption, group="Output", metavar="FILE", type=Path,
              help="Write what the scheduler did as JSON lines (no text)")  # fmt: skip
@output_options
def command(
    texts: tuple[str, ...],
    files: tuple[str, ...],
    is_chat: bool,
    params: SamplingParams,
    asked: AskedConfig,
    show_kv: bool,
    events_path: Path | None,
    output: Output,
) -> None:
    """Answer prompts, streaming to the terminal.

    Prompts are continued as they are; `--chat` puts them to the model as messages. All prompts and all of their `-n`
    answers run together, as many as the KV pool holds. Answers go to stdout, everything else to stderr.
    """
    prompts = [*texts, *(_read_prompt(name) for name in files)]
    if not prompts:
        raise InvalidParameterError(
            "there is nothing to answer", param="--prompt", hints=("octavo generate -p 'The capital of France is'",)
        )
    params = replace(params, seed=asked.config.seed)
    _check_reports(params, output)
    document = None
    with ExitStack() as stack:
        file = stack.enter_context(closing(EventFile(events_path))) if events_path is not None else None
        llm = _load(asked, output)
        if file is not None:
            _record(llm, asked, file)
        stream = _start(llm, prompts, params, is_chat=is_chat)
        if show_kv:
            from octavo.cli.kv_screen import show_kv_while_running

            stack.enter_context(show_kv_while_running(llm.engine, allocator=asked.config.kv_allocator))
        if output.is_json:
            document = _json_document(llm, stream, params)
        else:
            # A picture that redraws itself and text that grows would share the screen: text waits for its turn.
            _print_answers(stream, len(prompts) * params.n, params, is_live=not show_kv, output=output)
    if document is not None:
        # Only now is it certain that nothing fails any more: stdout gets one document, never two.
        click.echo(json.dumps(document, ensure_ascii=False))


def _check_reports(params: SamplingParams, output: Output) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not output.is_json:
            raise InvalidParameterError(
                "there is nowhere to print them", param=f"--{name.replace('_', '-')}", hints=("add --json",)
            )


def _read_prompt(name: str) -> str:
    param, what = "--prompt-file", "a prompt"
    if name == "-":
        return read_text_stream(sys.stdin.buffer, param=param, what=what, max_bytes=MAX_PROMPT_BYTES)
    return read_text_file(Path(name), param=param, what=what, max_bytes=MAX_PROMPT_BYTES)


def _load(asked: AskedConfig, output: Output) -> LLM:
    from octavo.cli.render import progress_bars
    from octavo.llm.offline import LLM

    with progress_bars(output) as progress:
        return LLM(asked.config, progress=progress)


def _start(llm: LLM, prompts: list[str], params: SamplingParams, *, is_chat: bool) -> Stream:
    if not is_chat:
        return llm.stream(prompts, params)
    if llm.tokenizer.chat_template is None:
        raise ModelFileError("the model has no chat template", hints=("leave out --chat to continue the text itself",))
    return llm.stream_chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)


def _record(llm: LLM, asked: AskedConfig, file: EventFile) -> None:
    card = llm.card
    file.begin(
        kv_allocator=asked.config.kv_allocator,
        num_blocks=card.num_blocks,
        block_size_tokens=card.block_size,
        max_model_len_tokens=card.max_model_len,
    )
    llm.engine.subscribe(file.take)


def _print_answers(stream: Stream, num_answers: int, params: SamplingParams, *, is_live: bool, output: Output) -> None:
    """Print one answer as it grows; several each when it is complete, in the order they end, named."""
    answers: dict[tuple[str, int], _Answer] = {}
    for delta in stream:
        answer = _add(answers, delta)
        if num_answers == 1 and is_live:
            click.echo(delta.text, nl=False)
            sys.stdout.flush()
        elif delta.finish_reason is not None and is_live:
            _print_named(answer, params)
    if not is_live:
        for answer in sorted(answers.values(), key=lambda one: (one.prompt_index, one.index)):
            _print_named(answer, params) if num_answers > 1 else click.echo(answer.text, nl=False)
    if num_answers == 1:
        click.echo()
    num_cut = sum(answer.finish_reason == "length" for answer in answers.values())
    if num_cut and not output.is_quiet:
        which = "the answer" if num_answers == 1 else f"{num_cut} of {num_answers} answers"
        click.echo(f"({which} ended at the length limit, --max-tokens {params.max_tokens})", err=True)


def _print_named(answer: _Answer, params: SamplingParams) -> None:
    name = f"prompt {answer.prompt_index}" + (f", answer {answer.index}" if params.n > 1 else "")
    click.echo(f"--- {name}\n{answer.text}")


def _add(answers: dict[tuple[str, int], _Answer], delta: OutputDelta) -> _Answer:
    key = delta.request_id, delta.index
    answer = answers.setdefault(key, _Answer(prompt_index=int(delta.request_id), index=delta.index))
    answer.text += delta.text
    answer.token_ids.extend(delta.token_ids)
    answer.finish_reason = delta.finish_reason or answer.finish_reason
    return answer


def _json_document(llm: LLM, stream: Stream, params: SamplingParams) -> dict[str, Any]:
    answers: dict[tuple[str, int], _Answer] = {}
    cached: dict[str, int] = {}
    prompt_logprobs: dict[int, list[Any]] = {}
    for delta in stream:
        answer = _add(answers, delta)
        cached[delta.request_id] = delta.num_cached_tokens
        answer.logprobs.extend(_logprob_document(llm, entry) for entry in delta.logprobs)
        scores = prompt_logprobs.setdefault(int(delta.request_id), [None])
        scores.extend(_logprob_document(llm, entry) for entry in delta.prompt_logprobs)
    outputs = []
    for answer in sorted(answers.values(), key=lambda one: (one.prompt_index, one.index)):
        document: dict[str, Any] = {
            "prompt_index": answer.prompt_index,
            "index": answer.index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
        if params.logprobs is not None:
            document["logprobs"] = answer.logprobs
        outputs.append(document)
    result: dict[str, Any] = {"schema": "octavo.generate/1", "model": llm.card.model, "outputs": outputs}
    if params.prompt_logprobs is not None:
        result["prompt_logprobs"] = [prompt_logprobs[index] for index in sorted(prompt_logprobs)]
    result["usage"] = {
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in stream.prompts),
        "completion_tokens": sum(len(answer.token_ids) for answer in answers.values()),
        "cached_tokens": sum(cached.values()),
    }
    return result


def _logprob_document(llm: LLM, entry: Any) -> dict[str, Any]:
    candidates = llm.candidates(entry)
    chosen = candidates[int(entry.token_id)]
    return {
        "token_id": int(entry.token_id),
        "token": chosen.decoded_token,
        "logprob": chosen.logprob,
        "rank": chosen.rank,
        "top": [
            {"token_id": int(token_id), "token": candidates[int(token_id)].decoded_token, "logprob": logprob}
            for token_id, logprob in entry.top
        ],
    }
