"""Draws a plan on the terminal: the memory bar, what the pool holds, levers, advice and sources.

Colour is decoration only: every part of the bar has its own mark, and words say the same without it.
"""

from __future__ import annotations

import os

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octavo.planner.levers import Lever
from octavo.planner.plan import Plan
from octavo.planner.two_ceilings import Ceilings
from octavo.units import GIB, MIB, format_bytes, format_concurrency

WIDTH = 96
_NARROW = 72
_EXACT, _ABOUT = "", "~"
_PARTS = (
    ("weights", "█", "blue"),
    ("activation peak", "▓", "cyan"),
    ("overhead", "▒", "magenta"),
    ("KV pool", "█", "green"),
    ("headroom", "·", "dim"),
)
_ADVICE_MARKS = {"change": ("→", "green"), "warning": ("!", "yellow"), "note": ("·", "dim")}


def print_plan(plan: Plan) -> None:
    """Write the card to stdout."""
    console = Console(highlight=False, width=_width())
    with console.capture() as card:
        _draw(console, plan)
    # Tables are padded to their width; a card that is pasted into a document need not be.
    click.echo("\n".join(line.rstrip() for line in card.get().splitlines()))


def print_answer(plan: Plan) -> None:
    """Write what was asked and nothing else: one line, and one for each way to hold a target."""
    words = [_verdict(plan).plain[2:]]
    if plan.concurrency_at_lengths is not None:
        words.append(f"{format_concurrency(plan.concurrency_at_lengths)} of the asked lengths")
    elif plan.lengths is not None and plan.fits:
        words.append("all of the asked lengths are longer")
    if plan.ceilings is not None and plan.ceilings.device_requests is not None and plan.ceilings.itl_s is not None:
        words.append(f"the device holds {plan.ceilings.device_requests:,} at {_ms(plan.ceilings.itl_s)} a token")
    click.echo("; ".join(words))
    for answer in plan.targets:
        click.echo(f"{format_concurrency(answer.concurrency)} requests at once: {answer.flags or answer.name}")
    if plan.target_concurrency and not plan.targets:
        click.echo(f"nothing that was tried holds {plan.target_concurrency:,} requests at once")


def _draw(console: Console, plan: Plan) -> None:
    console.print(_title(plan))
    console.print(_bar(plan, console.width))
    console.print(_memory_table(plan))
    console.print()
    console.print(_verdict(plan))
    _print_block(console, "Requests at once", _concurrency_table(plan))
    _print_block(console, "KV cache" + _of_device(plan), _kv_table(plan))
    console.print(Padding(Text(_pool_line(plan), style="dim"), (0, 0, 0, 2)))
    if plan.ceilings is not None:
        _print_block(console, "Two ceilings", _ceilings_table(plan.ceilings))
    if plan.levers:
        _print_block(console, "What each lever would do", _levers_table(plan))
        if any(lever.max_concurrency == plan.max_num_seqs for lever in plan.levers):
            words = (
                f"at {plan.max_num_seqs:,}, every seat is taken: Octavo makes no larger pool than its requests can use"
            )
            console.print(Padding(Text(words, style="dim"), (0, 0, 0, 2)))
    if plan.calibration:
        _print_block(console, "The rules against the log", _calibration_table(plan))
    if plan.target_concurrency:
        _print_block(console, f"What holds {plan.target_concurrency:,} requests at once", _targets_table(plan))
    if plan.advice:
        _print_block(console, "Advice", _advice_table(plan))
    _print_block(console, "Where the figures come from", _sources_table(plan))
    if plan.next_command:
        console.print(Text("\nnext: ").append(plan.next_command, style="bold"), soft_wrap=True)


def _width() -> int:
    console = Console()
    wanted = os.environ.get("COLUMNS", "")
    if not console.is_terminal and not wanted.isdecimal():
        return WIDTH
    return max(_NARROW, min(WIDTH, console.width))


def _print_block(console: Console, title: str, table: Table) -> None:
    console.print(Text("\n" + title, style="bold"))
    console.print(Padding(table, (0, 0, 0, 2)))


def _title(plan: Plan) -> Text:
    engine = f"{plan.engine} {plan.engine_version}".strip()
    if plan.engine_because:
        engine += f" ({plan.engine_because})"
    where = plan.device or "this machine"
    if plan.device is None and any(each.name == "memory" and "--memory" in each.source for each in plan.sources):
        where = "a machine of this memory"
    if plan.num_devices > 1:
        where = f"{plan.num_devices} x {where}"
    return Text.assemble(
        (plan.model, "bold"),
        f" on {where} under {engine}\n",
        (
            f"{_parameters(plan.parameters)} parameters, weights {plan.weights_as}; KV cache {plan.kv_cache_dtype}",
            "dim",
        ),
    )


def _bar(plan: Plan, width: int) -> Text:
    """Return a bar whose cells add up to its width; a part too small for one cell gets one, from the largest."""
    sizes = _sizes(plan)
    total = max(sum(sizes.values()), 1)
    cells_in_all = width - 2
    cells = {name: max(1 if size else 0, round(size / total * cells_in_all)) for name, size in sizes.items()}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += cells_in_all - sum(cells.values())
    bar = Text("[")
    for name, mark, style in _PARTS:
        bar.append(mark * max(0, cells[name]), style=style)
    return bar.append("]")


def _sizes(plan: Plan) -> dict[str, int]:
    return {
        "weights": plan.weight_bytes,
        "activation peak": plan.activation_peak_bytes,
        "overhead": plan.overhead_bytes,
        "KV pool": plan.kv_pool_bytes,
        "headroom": max(0, plan.headroom_bytes),
    }


def _memory_table(plan: Plan) -> Table:
    table = _table("", ">", ">", "")
    exact = {each.name: each.is_exact for each in plan.sources}
    sizes = {**_sizes(plan), "headroom": plan.headroom_bytes}
    # One unit for the column, so that a reader can add it up.
    unit, suffix = (GIB, "GiB") if plan.weight_bytes >= GIB else (MIB, "MiB")
    for name, mark, style in _PARTS:
        share = f"{sizes[name] / plan.memory_bytes:.1%}" if plan.memory_bytes else ""
        label = "missing" if name == "headroom" and sizes[name] < 0 else name
        table.add_row(
            Text.assemble((mark, style), f" {label}"),
            f"{sizes[name] / unit:,.2f} {suffix}",
            share,
            _spread(plan, name, exact),
        )
    table.add_row("= memory", f"{plan.memory_bytes / unit:,.2f} {suffix}", "", Text(_usable(plan), style="dim"))
    return table


def _usable(plan: Plan) -> str:
    text = f"{format_bytes(plan.usable_memory_bytes)} may be used"
    return text + (f", on each of {plan.num_devices} devices" if plan.num_devices > 1 else "")


def _spread(plan: Plan, name: str, exact: dict[str, bool]) -> Text:
    line = next((each for each in plan.sources if each.name == name), None)
    if line is None or exact.get(name, True) or line.low_bytes is None or line.high_bytes is None:
        return Text()
    low, high = max(0, line.low_bytes), max(0, line.high_bytes)
    return Text(f"between {format_bytes(low)} and {format_bytes(high)}", style="dim")


def _verdict(plan: Plan) -> Text:
    if plan.fits:
        text = f"fits: {format_concurrency(plan.max_concurrency)} requests of {plan.max_model_len:,} tokens at once"
        return Text.assemble(
            ("✓ ", "green"), (text, "bold"), f"; the longest that fits has {plan.longest_fitting_len:,}"
        )
    longest = plan.longest_fitting_len
    spent = plan.weight_bytes + plan.activation_peak_bytes + plan.overhead_bytes
    is_pool_refused = not plan.num_blocks and spent < plan.usable_memory_bytes
    if plan.refusal is not None and (is_pool_refused or (longest and longest >= plan.max_model_len)):
        return Text.assemble(("✗ ", "red"), ("does not fit", "bold"), f": {plan.refusal.message}")
    rest = f"; the longest that fits has {longest:,} tokens" if longest else "; not even one block of KV cache is left"
    return Text.assemble(("✗ ", "red"), ("does not fit", "bold"), rest)


def _concurrency_table(plan: Plan) -> Table:
    table = _table("", ">", "")
    low = plan.max_concurrency_low
    between = "" if low == plan.max_concurrency else f"at least {format_concurrency(low)} with the pool at its low end"
    table.add_row(
        f"{plan.max_model_len:,} tokens each, {plan.kv_allocator}",
        format_concurrency(plan.max_concurrency),
        Text(between, style="dim"),
    )
    if plan.lengths is not None:
        prompt, output = plan.lengths["mean_prompt_tokens"], plan.lengths["mean_output_tokens"]
        words = f"{plan.lengths['source']}: {float(prompt):,.0f} + {float(output):,.0f} on average, at a random step"
        count = "-" if plan.concurrency_at_lengths is None else format_concurrency(plan.concurrency_at_lengths)
        table.add_row(f"of the asked lengths, {plan.kv_allocator}", count, Text(words, style="dim"))
    table.add_row(
        "any length, reserved",
        f"{plan.reserved_concurrency:,}",
        Text("if each reserved its greatest length at the start", style="dim"),
    )
    table.add_row("seats in a step", f"{plan.max_num_seqs:,}", Text("--max-num-seqs: no more run at once", style="dim"))
    return table


def _kv_table(plan: Plan) -> Table:
    table = _table("", ">", ">", ">")
    table.add_row("", *(Text(head, style="dim") for head in ("layers", "a token", f"{plan.block_size} tokens")))
    for group in plan.groups:
        own = f" + {format_bytes(group.request_bytes)} a request" if group.request_bytes else ""
        table.add_row(
            group.name + own, f"{group.num_layers}", format_bytes(group.token_bytes), format_bytes(group.block_bytes)
        )
    if len(plan.groups) > 1:
        table.add_row("together", "", format_bytes(plan.kv_bytes_per_token), "")
    return table


def _pool_line(plan: Plan) -> str:
    return (
        f"pool: {plan.num_blocks:,} blocks of {format_bytes(plan.kv_bytes_per_block)} = {plan.pool_tokens:,} tokens;"
        f" {plan.kv_tokens_like_weights:,} cached tokens weigh as much as the weights"
    )


def _ceilings_table(ceilings: Ceilings) -> Table:
    table = _table("", ">", "")
    at = f"at {ceilings.context_tokens:,} cached tokens each"
    table.add_row(
        "memory holds",
        format_concurrency(ceilings.memory_requests),
        f"{at}; a step then takes {_ms(ceilings.memory_step_s)}",
    )
    if ceilings.device_requests is not None and ceilings.itl_s is not None:
        table.add_row(
            "the device holds",
            f"{ceilings.device_requests:,}",
            f"at {_ms(ceilings.itl_s)} a token; waits for {ceilings.bound}",
        )
        table.add_row(Text(f"{'the device' if ceilings.binds == 'device' else 'memory'} binds", style="bold"))
    return table


def _ms(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:,.3g} us"
    return f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _levers_table(plan: Plan) -> Table:
    at_lengths = plan.concurrency_at_lengths
    has_lengths = at_lengths is not None
    table = _table("<", ">", ">", ">", *((">",) if has_lengths else ()))
    heads = ["KV a token", "requests at once", "gain", *(("at lengths",) if has_lengths else ())]
    table.add_row("", *(Text(head, style="dim") for head in heads))
    own: list[str | Text] = [
        "as planned",
        format_bytes(plan.kv_bytes_per_token),
        format_concurrency(plan.max_concurrency),
        "",
    ]
    table.add_row(*own, *(() if at_lengths is None else (format_concurrency(at_lengths),)))
    for lever in plan.levers:
        table.add_row(*_lever_row(lever, has_lengths=has_lengths))
    return table


def _lever_row(lever: Lever, *, has_lengths: bool) -> list[str | Text]:
    gain = f"x {lever.gain_ratio:.2f}" if lever.gain_ratio else "-"
    style = "green" if lever.gain_ratio > 1.005 else "red" if 0 < lever.gain_ratio < 0.995 else ""
    row: list[str | Text] = [
        lever.options or Text(f"if: {lever.name}", style="dim"),
        format_bytes(lever.kv_bytes_per_token),
        format_concurrency(lever.max_concurrency),
        Text(gain, style=style),
    ]
    if has_lengths:
        at_lengths = lever.concurrency_at_lengths
        row.append("-" if at_lengths is None else format_concurrency(at_lengths))
    return row


def _calibration_table(plan: Plan) -> Table:
    table = _table("", ">", ">", ">", "")
    table.add_row("", *(Text(head, style="dim") for head in ("rule", "log", "off by", "")))
    for each in plan.calibration:
        ratio = each.difference_ratio
        table.add_row(
            each.term,
            format_bytes(each.rule.value_bytes),
            format_bytes(each.logged_bytes),
            "-" if ratio is None else f"{ratio:+.1%}",
            Text("inside its interval" if each.is_inside else "outside of its interval", style="dim"),
        )
    return table


def _targets_table(plan: Plan) -> Table:
    table = _table("", ">", "")
    for answer in plan.targets:
        table.add_row(answer.name, format_concurrency(answer.concurrency), Text(answer.flags, style="dim"))
    if not plan.targets:
        table.add_row("nothing that was tried: ask for fewer, or for shorter requests")
    return table


def _advice_table(plan: Plan) -> Table:
    table = _table("", "")
    for advice in plan.advice:
        mark, style = _ADVICE_MARKS[advice.kind]
        table.add_row(Text(mark, style=style), advice.text)
    return table


def _sources_table(plan: Plan) -> Table:
    table = _table("", "")
    for line in plan.sources:
        mark = _EXACT if line.is_exact else _ABOUT
        table.add_row(Text(f"{mark}{line.name}", style="dim"), Text(line.source, style="dim"))
    if plan.ceilings is not None:
        table.add_row(Text("~speed", style="dim"), Text(plan.ceilings.source, style="dim"))
    return table


def _of_device(plan: Plan) -> str:
    return f", on one device of {plan.num_devices}" if plan.num_devices > 1 else ""


def _parameters(count: int) -> str:
    for size, word in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,}"


def _table(*columns: str) -> Table:
    """Return a table without lines; `>` is a column of numbers, `<` of words that are broken where it is narrow."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        is_whole = column == ">" or (index == 0 and column != "<")
        table.add_column(justify="right" if column == ">" else "left", no_wrap=is_whole)
    return table
