"""Limits that control groups put on this process: memory and CPU time, versions 1 and 2, at any level above it.

A container sees its own group as the root of the mount, or (version 1 without a namespace) under the host's path; the
mount table tells which. Every level up to the mount point may set a limit, so the tightest one counts. Read-only, and
nothing is cached: a limit may change while we run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# A limit above this is the kernel's way of writing "none" (version 1 prints the largest page-aligned number).
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The level with the least room: its limit, what counts against it, and the file that says so."""

    limit_bytes: int
    used_bytes: int
    path: str

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """CPU time per wall time, in CPUs (1.5 = one and a half), and the file that says so."""

    cpus: float
    path: str


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    root: PurePosixPath
    point: PurePosixPath


def memory_limit(root: Path) -> MemoryLimit | None:
    """Return the tightest memory limit, or `None` when there is none.

    Page cache that was not used lately (`inactive_file`) is not counted as used: the kernel gives it back first, and
    a model file that was just read would otherwise count twice.
    """
    tightest: MemoryLimit | None = None
    for version, folder in _levels(root, "memory"):
        limit_name, used_name, cache_key = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit = _read_int(folder / limit_name)
        used = _read_int(folder / used_name)
        if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
            continue
        cache = _read_stat(folder / "memory.stat", cache_key)
        found = MemoryLimit(limit_bytes=limit, used_bytes=max(0, used - cache), path=_shown(root, folder / limit_name))
        if tightest is None or found.free_bytes < tightest.free_bytes:
            tightest = found
    return tightest


def cpu_quota(root: Path) -> CpuQuota | None:
    """Return the tightest CPU quota, or `None` when there is none."""
    tightest: CpuQuota | None = None
    for version, folder in _levels(root, "cpu"):
        if version == 2:
            path = folder / "cpu.max"
            words = _read(path).split()
            quota_us, period_us = (words[0], words[1]) if len(words) == 2 else ("max", "100000")
        else:
            path = folder / "cpu.cfs_quota_us"
            quota_us, period_us = _read(path).strip(), _read(folder / "cpu.cfs_period_us").strip()
        if not quota_us.isdigit() or not period_us.isdigit() or int(period_us) == 0 or int(quota_us) == 0:
            continue  # "max" and -1 mean no quota
        found = CpuQuota(cpus=int(quota_us) / int(period_us), path=_shown(root, path))
        if tightest is None or found.cpus < tightest.cpus:
            tightest = found
    return tightest


def _levels(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) from this process's own group up to the mount point."""
    mounts = _mounts(root)
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        is_v2 = number == "0" and not names
        if not is_v2 and controller not in names.split(","):
            continue
        for mount in mounts:
            if mount.version != (2 if is_v2 else 1) or (not is_v2 and controller not in mount.controllers):
                continue
            point = root / mount.point.relative_to("/")
            inside = _inside(PurePosixPath(path), mount.root)
            while True:
                yield mount.version, point / inside
                if inside == PurePosixPath():
                    break
                inside = inside.parent
            break


def _inside(path: PurePosixPath, mount_root: PurePosixPath) -> PurePosixPath:
    # A path outside the mounted part (another namespace's view) cannot be looked up: the mount point itself counts.
    if path.is_relative_to(mount_root) and ".." not in path.parts:
        return path.relative_to(mount_root)
    return PurePosixPath()


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        words, kind_words = place.split(), kind.split()
        if len(words) < 5 or len(kind_words) < 3 or kind_words[0] not in {"cgroup", "cgroup2"}:
            continue
        mounts.append(
            _Mount(
                version=2 if kind_words[0] == "cgroup2" else 1,
                controllers=frozenset(kind_words[2].split(",")),
                root=PurePosixPath(words[3]),
                point=PurePosixPath(words[4]),
            )
        )
    return mounts


def _shown(root: Path, path: Path) -> str:
    return "/" + path.relative_to(root).as_posix()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
