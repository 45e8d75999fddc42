"""Traces: the lengths of recorded requests, from CSV or JSON lines.

Only the two length columns are looked at (`_NAMES`), so the published traces of Azure, Mooncake, Vidur and
LLMServingSim are read as they are, and so is a workload of prompts as token ids. An entry without lengths is an error,
not left out.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.config.text_file import read_text_file
from octavo.errors import InvalidParameterError
from octavo.planner.lengths import MAX_TOKENS, LengthClass, Lengths
from octavo.units import MIB, quote

MAX_TRACE_BYTES = 256 * MIB

# Columns of published traces, in pairs: tokens of the prompt, tokens of the answer.
_NAMES = (
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("input_toks", "output_toks"),
    ("prompt_tokens", "output_tokens"),
    ("num_prompt_tokens", "num_output_tokens"),
    ("prompt_tokens", "completion_tokens"),
)


def read_trace(path: Path, *, param: str = "trace") -> Lengths:
    """Read the lengths of a trace.

    Raises:
        InvalidParameterError: no lengths in it, or more than is read.
        MachineError: it cannot be read.
    """
    text = read_text_file(
        path,
        param=param,
        what="a trace",
        max_bytes=MAX_TRACE_BYTES,
        encoding="utf-8-sig",
        hints=(f"give a part of it, as `head -n 100000 {path} > part{path.suffix}`",),
    )
    try:
        pairs = list(_pairs(text, path, param))
    except csv.Error as error:
        raise InvalidParameterError(f"{path} is neither CSV nor JSON lines: {error}", param=param) from error
    counted: dict[tuple[int, int], int] = {}
    for pair in pairs:
        counted[pair] = counted.get(pair, 0) + 1
    # A request without a generated token holds nothing between two steps.
    classes = tuple(LengthClass(*pair, weight) for pair, weight in counted.items() if pair[1] >= 1)
    if not classes:
        raise InvalidParameterError(f"{path} holds no request with an output token", param=param)
    num_left_out = sum(weight for (_, output), weight in counted.items() if output < 1)
    left_out = f", {num_left_out:,} of them without an output token and left out" if num_left_out else ""
    return Lengths(classes=classes, source=f"{len(pairs):,} requests of {path.name}{left_out}")


def _pairs(text: str, path: Path, param: str) -> Iterator[tuple[int, int]]:
    for number, row in enumerate(_rows(text, path, param), start=1):
        found = _lengths_of(row) if isinstance(row, Mapping) else None
        if found is None:
            raise InvalidParameterError(
                f"{path}: entry {number:,} has no lengths", param=param, because=_what_is_wrong(row)
            )
        yield found


def _rows(text: str, path: Path, param: str) -> Iterable[object]:
    start = text.lstrip()[:1]
    if start not in {"{", "["}:
        return _csv_rows(text, path, param)
    if start == "[":
        whole: list[object] = _json(text, path, param, where="")
        return whole
    # Lines end in line feeds only: a prompt may hold what else Unicode calls the end of a line.
    lines = enumerate(text.split("\n"), start=1)
    return [_json(line, path, param, where=f" in line {number:,}") for number, line in lines if line.strip()]


def _json(text: str, path: Path, param: str, *, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"{path} is neither CSV nor JSON lines{where}: {error}", param=param) from error


def _csv_rows(text: str, path: Path, param: str) -> Iterable[object]:
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    columns = list(reader.fieldnames or ())
    pairs = [pair for pair in _NAMES if set(pair) <= set(columns)]
    if not pairs:
        raise InvalidParameterError(
            f"{path} has no columns of lengths",
            param=param,
            because=f"its first line names {quote(', '.join(columns))}; {_known_columns()}",
        )
    twice = [name for name in pairs[0] if columns.count(name) > 1]
    if twice:
        raise InvalidParameterError(f"{path} has the column {twice[0]} twice", param=param)
    return reader


def _what_is_wrong(row: object) -> str:
    """Say what keeps an entry from having lengths: other columns, or a value that is none."""
    if not isinstance(row, Mapping):
        return f"it is {quote(row)}, and no object"
    for pair in (("prompt_token_ids", "max_tokens"), *_NAMES):
        if all(name in row for name in pair):
            values = " and ".join(f"{name} is {quote(row[name])}" for name in pair)
            return f"{values}; a length is a whole number of tokens, from 0 to {MAX_TOKENS:,}"
    return _known_columns()


def _known_columns() -> str:
    return "known columns are " + ", ".join(f"{a} and {b}" for a, b in _NAMES)


def _lengths_of(row: Mapping[str, Any]) -> tuple[int, int] | None:
    if isinstance(row.get("prompt_token_ids"), list):
        output = _whole(row.get("max_tokens"))
        return None if output is None else (len(row["prompt_token_ids"]), output)
    for prompt_name, output_name in _NAMES:
        prompt, output = _whole(row.get(prompt_name)), _whole(row.get(output_name))
        if prompt is not None and output is not None:
            return prompt, output
    return None


def _whole(value: object) -> int | None:
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    is_whole = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_TOKENS
    return number if is_whole else None  # type: ignore[return-value]  # narrowed by is_whole
