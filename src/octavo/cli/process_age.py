"""How long this process has been running, the interpreter's own start included."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED_S = time.monotonic()


def process_age_s() -> float:
    """Return seconds since the process was started (to 10 ms); since this module's import where /proc is missing."""
    try:
        # Field 22 is the start in clock ticks after boot; field 2, the name, may hold spaces and ends with ")".
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return time.monotonic() - _IMPORTED_S
    return uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
