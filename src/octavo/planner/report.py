"""The plan as an HTML report: one file, no scripts, light and dark; the card's words, with bar and curves drawn."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from octavo.planner.plan import Plan
from octavo.planner.report_charts import curves_svg, memory_svg
from octavo.planner.report_style import STYLE
from octavo.units import format_bytes, format_concurrency


def report_page(plan: Plan) -> str:
    """Return a complete HTML document."""
    parts = [
        _head(plan),
        _figures(plan),
        _section("Where the memory goes", memory_svg(plan), _memory_rows(plan)),
        _section("Requests at once, by their length", curves_svg(plan), _curve_table(plan)) if plan.curves else "",
        _section("What each lever would do", _levers(plan)),
        _section("What a token costs", _groups(plan)),
        _ceilings(plan),
        _targets(plan),
        _advice(plan),
        _section("Where the figures come from", _sources(plan)),
        _next(plan),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(plan.model)}: plan</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(part for part in parts if part)
        + "</main></body></html>\n"
    )


def _head(plan: Plan) -> str:
    where = plan.device or "a machine"
    if plan.num_devices > 1:
        where = f"{plan.num_devices} x {where}"
    engine = f"{plan.engine} {plan.engine_version}".strip()
    because = f" ({plan.engine_because})" if plan.engine_because else ""
    return (
        f"<header><h1>{escape(plan.model)}</h1><p>on {escape(where)}, under {escape(engine + because)};"
        f" {plan.parameters / 1e9:,.2f} billion parameters, weights {escape(plan.weights_as)},"
        f" KV cache {escape(plan.kv_cache_dtype)}</p></header>"
    )


def _figures(plan: Plan) -> str:
    figures = [
        (format_concurrency(plan.max_concurrency), f"requests of {plan.max_model_len:,} tokens at once"),
        (f"{plan.pool_tokens:,}", "tokens in the KV pool"),
        (f"{plan.longest_fitting_len:,}", "tokens in the longest request that fits"),
        (format_bytes(plan.kv_bytes_per_token), "of KV cache a token" + _per_device(plan)),
    ]
    if plan.concurrency_at_lengths is not None and plan.lengths is not None:
        source = str(plan.lengths["source"]).removeprefix("--")
        figures.insert(1, (format_concurrency(plan.concurrency_at_lengths), f"requests at once at {source}"))
    verdict = "fits" if plan.fits else "does not fit"
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in figures)
    return f"<p class='verdict {'good' if plan.fits else 'bad'}'>{verdict}</p><div class='figures'>{cells}</div>"


def _per_device(plan: Plan) -> str:
    return f", on each of {plan.num_devices} devices" if plan.num_devices > 1 else ""


def _memory_rows(plan: Plan) -> str:
    rows = [
        ("weights", plan.weight_bytes),
        ("activation peak", plan.activation_peak_bytes),
        ("overhead", plan.overhead_bytes),
        ("KV pool", plan.kv_pool_bytes),
        ("headroom" if plan.headroom_bytes >= 0 else "missing", plan.headroom_bytes),
        ("memory" + _per_device(plan), plan.memory_bytes),
    ]
    return _table(("", "bytes", ""), [(name, f"{size:,}", format_bytes(size)) for name, size in rows])


def _curve_table(plan: Plan) -> str:
    lengths = plan.curves[0].lengths
    rows = [
        (f"{length:,}", *(format_concurrency(curve.concurrency[index]) for curve in plan.curves))
        for index, length in enumerate(lengths)
    ]
    table = _table(("tokens of a request", *(curve.kv_cache_dtype for curve in plan.curves)), rows)
    return f"<details><summary>as a table</summary>{table}</details>"


def _levers(plan: Plan) -> str:
    has_lengths = plan.concurrency_at_lengths is not None
    most = max([lever.gain_ratio for lever in plan.levers] + [1.0])
    rows = []
    for lever in plan.levers:
        name = f"<code>{escape(lever.options)}</code>" if lever.options else f"if: {escape(lever.name)}"
        bar = f"<i class='gain' style='width:{lever.gain_ratio / most * 100:.1f}%'></i>"
        cells = [name, format_bytes(lever.kv_bytes_per_token), format_concurrency(lever.max_concurrency)]
        if has_lengths:
            at_lengths = lever.concurrency_at_lengths
            cells.append("-" if at_lengths is None else f"{at_lengths:,.1f}")
        rows.append((*cells, f"x {lever.gain_ratio:.2f}", bar))
    heads = ["", "KV a token", "requests at once", *(("at lengths",) if has_lengths else ()), "gain", ""]
    return _raw_table(heads, rows)


def _groups(plan: Plan) -> str:
    rows = [
        (
            group.name,
            f"{group.num_layers}",
            format_bytes(group.token_bytes),
            format_bytes(group.block_bytes),
            format_bytes(group.request_bytes) if group.request_bytes else "",
        )
        for group in plan.groups
    ]
    return _table(("layers" + _per_device(plan), "", "a token", f"{plan.block_size} tokens", "a request"), rows) + (
        f"<p>{plan.kv_tokens_like_weights:,} cached tokens weigh as much as the weights.</p>"
    )


def _ceilings(plan: Plan) -> str:
    ceilings = plan.ceilings
    if ceilings is None:
        return ""
    rows = [
        (
            "memory holds",
            format_concurrency(ceilings.memory_requests),
            f"a step then takes {ceilings.memory_step_s * 1000:,.1f} ms",
        )
    ]
    if ceilings.device_requests is not None and ceilings.itl_s is not None:
        rows.append(
            (
                "the device holds",
                f"{ceilings.device_requests:,}",
                f"at {ceilings.itl_s * 1000:,.1f} ms a token; waits for {ceilings.bound}",
            )
        )
        rows.append((f"{'the device' if ceilings.binds == 'device' else 'memory'} binds", "", ""))
    note = f"<p>{ceilings.context_tokens:,} cached tokens each; {escape(ceilings.source)}.</p>"
    return _section("Two ceilings", _table(("", "requests", ""), rows), note)


def _targets(plan: Plan) -> str:
    if plan.target_concurrency is None:
        return ""
    rows = [
        (escape(each.name), format_concurrency(each.concurrency), f"<code>{escape(each.flags)}</code>")
        for each in plan.targets
    ]
    return _section(f"What holds {plan.target_concurrency:,} requests at once", _raw_table(("", "holds", ""), rows))


def _advice(plan: Plan) -> str:
    if not plan.advice:
        return ""
    items = "".join(f"<li class='{each.kind}'>{_with_code(each.text)}</li>" for each in plan.advice)
    return _section("Advice", f"<ul>{items}</ul>")


def _with_code(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _sources(plan: Plan) -> str:
    return _table(
        ("", "", ""),
        [(line.name, "exact" if line.is_exact else "estimated", line.source) for line in plan.sources],
    )


def _next(plan: Plan) -> str:
    if not plan.next_command:
        return ""
    return f"<section><h2>Next</h2><pre><code>{escape(plan.next_command)}</code></pre></section>"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return _raw_table(heads, [[escape(cell) for cell in row] for row in rows])


def _raw_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; the first column is text, the others are numbers as far as they look like them."""
    heads = list(heads)
    head = "".join(f"<th>{escape(each)}</th>" for each in heads) if any(heads) else ""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{'<thead><tr>' + head + '</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
