"""Devices: how much memory accelerators and CPUs have, how much of it an engine sees, and how fast they are.

The figures and their sources are in `data/hardware.json`. Memory is binary, rates are decimal and dense: what a data
sheet headlines is often the sparse rate, twice as much.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from octavo.errors import InvalidParameterError
from octavo.planner.estimate import Estimate, around
from octavo.units import GIB, quote

DeviceKind = Literal["gpu", "accelerator", "unified", "cpu"]

# Names that people say for one of several variants; the variant is the common one.
_SPOKEN = MappingProxyType(
    {
        "h100": "h100-sxm",
        "h100-80gb": "h100-sxm",
        "a100-80gb": "a100-80-sxm",
        "a100-80": "a100-80-sxm",
        "a100-40gb": "a100-40",
        "gh200": "gh200-96",
        "v100": "v100-16",
        "l40": "l40s",
        "dgx-spark": "gb10",
    }
)

_TELLS_NOTHING = frozenset(
    ("nvidia", "amd", "intel", "apple", "geforce", "tesla", "instinct", "hbm2", "hbm2e", "hbm3", "hbm3e")
)

# How far the memory an engine sees lies from the figure here, as a share: readings of one device differ by 0.1 %, and
# drivers keep 1 to 1.8 % of what a data sheet says (9 % of a T4 or an A10G, whose error correction takes memory, too).
_READ_SHARE = 0.0015
_RECALLED_SHARE = 0.008
_SHEET_SHARE = 0.985
_SHEET_BELOW, _SHEET_ABOVE = 0.06, 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or the memory and cores of one CPU socket.

    Args:
        id: Short name, as `--device` takes it.
        memory_bytes: What a driver reports, or else what the data sheet says.
        visible: What an engine sees of it, the number that its utilisation setting is a share of.
        bandwidth_bytes_per_s: Peak of the memory.
        fp16_flop_per_s, fp8_flop_per_s: Dense peak with 32-bit sums; `None` where unknown, or no such units.
        provenance: `file` (read from the source) or `recalled` (published figures, from memory).
        note: What to beware of; empty if nothing.
    """

    id: str
    name: str
    kind: DeviceKind
    memory_bytes: int
    visible: Estimate
    bandwidth_bytes_per_s: float
    fp16_flop_per_s: float | None
    fp8_flop_per_s: float | None
    provenance: str
    source: str
    note: str

    @property
    def visible_bytes(self) -> int:
        return self.visible.value_bytes

    @property
    def gets_large_batches(self) -> bool:
        """Whether vLLM takes its larger defaults here: 70 GiB or more, and no A100 (vllm-project/vllm#17885)."""
        return self.visible_bytes >= 70 * GIB and not self.id.startswith("a100")


def list_devices() -> tuple[Device, ...]:
    """Return all known devices in the order of the table."""
    return tuple(_table().values())


def find_device(name: str, *, param: str = "device") -> Device:
    """Return the device that `name` means: an id, what people call it, or words of its full name.

    `h100-sxm`, `h100` and `NVIDIA H100 80GB SXM5` are one device; `a100` is three, and refused with their names.

    Raises:
        InvalidParameterError: no such device, or several.
    """
    table = _table()
    key = _normal(name)
    if key in table:
        return table[key]
    if key in _SPOKEN:
        return table[_SPOKEN[key]]
    matches = _matches(key, table)
    if len(matches) == 1:
        return table[matches[0]]
    if matches:
        raise InvalidParameterError(
            f"{quote(name)} may be {', '.join(matches)}",
            param=param,
            because="their memory or speed differs",
            hints=(f"write for example `--{param} {matches[0]}`",),
        )
    close = difflib.get_close_matches(key, (*table, *_SPOKEN), n=1, cutoff=0.5)
    raise InvalidParameterError(
        f"there is no device {quote(name)} in the table",
        param=param,
        because="its memory and speed are needed, and are not guessed",
        hints=(*((f"did you mean `{close[0]}`?",) if close else ()), "`--memory 24GiB` plans for any device"),
    )


def _matches(key: str, table: Mapping[str, Device]) -> list[str]:
    """Return the ids that begin so, or else those whose id and name contain every word."""
    if not key:
        return []
    starting = [each for each in table if each.startswith(key)]
    if starting:
        return starting
    words = set(key.split("-"))
    return [each for each, device in table.items() if words <= set(f"{each}-{_normal(device.name)}".split("-"))]


def _normal(name: str) -> str:
    """Return the words that tell devices apart, joined by dashes: drivers also name maker and memory kind."""
    words = re.sub(r"[^a-z0-9.+]+", " ", name.lower()).split()
    return "-".join(re.sub(r"^sxm\d$", "sxm", word) for word in words if word not in _TELLS_NOTHING)


@cache
def _table() -> Mapping[str, Device]:
    path = Path(__file__).with_name("data") / "hardware.json"
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["hardware"]
    return MappingProxyType({each: _device(each, row) for each, row in rows.items()})


def _device(id: str, row: Mapping[str, Any]) -> Device:
    fp16, fp8 = row["peak_fp16_dense_tflops"], row["peak_fp8_dense_tflops"]
    return Device(
        id=id,
        name=row["name"],
        kind=row["kind"],
        memory_bytes=row["memory_bytes"],
        visible=_visible(row),
        bandwidth_bytes_per_s=float(row["memory_bandwidth_bytes_per_s"]),
        fp16_flop_per_s=None if fp16 is None else fp16 * 1e12,
        fp8_flop_per_s=None if fp8 is None else fp8 * 1e12,
        provenance=row["provenance"],
        source=row["source"],
        note=row["note"] or "",
    )


def _visible(row: Mapping[str, Any]) -> Estimate:
    if row["engine_visible_gib"] is None:
        nominal = row["memory_bytes"]
        return around(
            nominal * _SHEET_SHARE,
            below=nominal * _SHEET_BELOW,
            above=nominal * _SHEET_ABOVE,
            source=f"{_SHEET_SHARE:.1%} of the nominal memory, a guess: no reading of this device is known",
        )
    visible = row["engine_visible_gib"] * GIB
    source = str(row["engine_visible_source"])
    share = _RECALLED_SHARE if source.startswith("recalled") else _READ_SHARE
    return around(visible, below=visible * share, above=visible * share, source=source)
