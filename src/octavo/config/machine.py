"""Machine: what this computer, and the limits around this process, have to give.

Facts only; what to make of them is decided in `planner/resolve.py`. Linux: everything is read below /proc and /sys,
whose place can be given, so that tests bring their own machine.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from octavo.config import cgroup
from octavo.errors import MachineError
from octavo.units import KIB, format_bytes

ISA_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")
"""CPU flags worth telling: those that some kernel, of ours or to come, would use."""

AVX2_FLAGS = ("avx2", "fma", "f16c")
"""What the kernels for AVX2 need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory and processors as this process may use them.

    Args:
        total_bytes: Memory of the computer.
        available_bytes: What this process can still take without swapping: the least of the kernel's own estimate and
            the room under every cgroup limit.
        available_because: Where `available_bytes` comes from, in words.
        memory_limit: The tightest cgroup limit, if any.
        num_logical_cpus: CPUs this process may run on (affinity).
        num_physical_cores: Distinct cores among them; two hyper-threads are one core.
        cpu_quota: CPU time limit of the cgroup, if any.
        cpu_model: Name of the processor; may be empty.
        architecture: `x86_64`, `aarch64`, ...
        isa_flags: Those of `ISA_FLAGS` that the CPU has.
        resident_bytes: Resident memory of this process.
    """

    total_bytes: int
    available_bytes: int
    available_because: str
    memory_limit: cgroup.MemoryLimit | None
    num_logical_cpus: int
    num_physical_cores: int
    cpu_quota: cgroup.CpuQuota | None
    cpu_model: str
    architecture: str
    isa_flags: tuple[str, ...]
    resident_bytes: int


def read_machine(*, root: Path = Path("/"), affinity: AbstractSet[int] | None = None) -> Machine:
    """Read the facts of this machine.

    Args:
        root: Folder that holds `proc` and `sys`.
        affinity: CPUs this process may run on; asked of the kernel when not given.

    Raises:
        MachineError: /proc/meminfo cannot be read.
    """
    memory = _meminfo(root)
    limit = cgroup.memory_limit(root)
    available, because = memory["MemAvailable"], "free memory as the kernel estimates it (MemAvailable)"
    if limit is not None and limit.free_bytes < available:
        available = limit.free_bytes
        because = (
            f"cgroup limit {format_bytes(limit.limit_bytes)} less {format_bytes(limit.used_bytes)} used ({limit.path})"
        )
    cpus = os.sched_getaffinity(0) if affinity is None else affinity
    cpu_model, flags = _cpuinfo(root)
    return Machine(
        total_bytes=memory["MemTotal"],
        available_bytes=available,
        available_because=because,
        memory_limit=limit,
        num_logical_cpus=len(cpus),
        num_physical_cores=_count_cores(root, cpus),
        cpu_quota=cgroup.cpu_quota(root),
        cpu_model=cpu_model,
        architecture=os.uname().machine,
        isa_flags=tuple(flag for flag in ISA_FLAGS if flag in flags),
        resident_bytes=_resident_bytes(root),
    )


def _meminfo(root: Path) -> dict[str, int]:
    path = root / "proc/meminfo"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MachineError(
            f"cannot read {path}: {error.strerror}",
            because="Octavo learns from it how much memory there is (Linux only)",
        ) from error
    found = {name: int(value.split()[0]) * KIB for name, _, value in (line.partition(":") for line in lines) if value}
    total = found.get("MemTotal", 0)
    # Sandboxes that emulate /proc may leave MemAvailable out; free memory is then the safe answer.
    return {"MemTotal": total, "MemAvailable": found.get("MemAvailable", found.get("MemFree", total))}


def _cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    model, flags = "", frozenset[str]()
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return model, flags
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and not model:
            model = value.strip()
        if name.strip() in {"flags", "Features"} and not flags:
            flags = frozenset(value.split())
    return model, flags


def _count_cores(root: Path, cpus: AbstractSet[int]) -> int:
    # Hyper-threads of one core name the same siblings. Core ids would not do: virtual machines number them all alike.
    cores = set()
    for cpu in cpus:
        try:
            path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            siblings = path.read_text(encoding="utf-8").strip()
        except OSError:
            siblings = str(cpu)  # no topology: every CPU counts as a core
        cores.add(siblings)
    return len(cores)


def _resident_bytes(root: Path) -> int:
    try:
        return int((root / "proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
