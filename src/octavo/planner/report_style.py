"""The looks of the report: one style sheet, for light and dark."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --ink: #1d1c1a; --soft: #6a675f; --line: #e4e1da;
  --s1: #2f6fde; --s2: #d9822b; --s3: #2e9f6b; --s4: #8a5cd1; --s5: #c2476d; --good: #1f8a57; --bad: #c0392b;
  --weights: #2f6fde; --activation: #6db6c9; --overhead: #b07ac9; --pool: #2e9f6b; --free: #ddd9d0; }
@media (prefers-color-scheme: dark) { :root { --page: #161614; --card: #1f1f1c; --ink: #ecebe6; --soft: #a09d94;
  --line: #34332f; --s1: #7aa7ff; --s2: #f0a45a; --s3: #5cc795; --s4: #b794f0; --s5: #ee83a4; --good: #5cc795;
  --bad: #ff8375; --weights: #5b8ff0; --activation: #4f9db2; --overhead: #a978c9; --pool: #45b183; --free: #3a3934; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 12px; }
header p, section > p { color: var(--soft); margin: 4px 0 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; overflow-x: auto; }
.verdict { display: inline-block; margin: 18px 0 0; padding: 2px 12px; border-radius: 99px; font-weight: 600;
  border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px; margin-top: 14px; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.figures b { display: block; font-size: 23px; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.figures span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 8px; }
th { text-align: right; font-weight: 500; color: var(--soft); } th:first-child { text-align: left; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { text-align: right; font-variant-numeric: tabular-nums; } td:first-child { text-align: left; }
td:last-child { text-align: left; padding-left: 10px; min-width: 130px; } tr:last-child td { border-bottom: 0; }
.gain { display: block; height: 10px; margin-top: 6px; border-radius: 3px; background: var(--s1); min-width: 2px; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { margin: 0; padding: 12px 14px; background: var(--page); border: 1px solid var(--line); border-radius: 8px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 20px; } li { margin: 4px 0; }
li.warning::marker { color: var(--bad); } li.change::marker { color: var(--good); }
details { margin-top: 8px; } summary { color: var(--soft); cursor: pointer; font-size: 13px; }
td:first-child { min-width: 150px; } th, td:not(:first-child):not(:last-child) { white-space: nowrap; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); } svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); }
"""
