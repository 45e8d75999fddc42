"""Memory, cores and limits, read from a machine that the test made."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.machine import read_machine
from octavo.errors import MachineError

GIB = 2**30
MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def computer(tmp_path):
    """Eight logical CPUs on four cores, 16 GiB of memory, 12 of them available, no cgroup."""
    files = {
        "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemFree: {2**20} kB\nMemAvailable: {12 * 2**20} kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 fma f16c avx512f\n\n",
        "proc/self/statm": "5000 1000 300 1 0 400 0\n",
    }
    for cpu in range(8):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu % 4},{cpu % 4 + 4}\n"
    return write(tmp_path, files)


def test_machine_without_limits_gives_what_the_kernel_has_available(computer):
    machine = read_machine(root=computer, affinity=set(range(8)))

    assert machine.total_bytes == 16 * GIB
    assert machine.available_bytes == 12 * GIB
    assert "MemAvailable" in machine.available_because
    assert machine.memory_limit is None
    assert machine.cpu_quota is None
    assert (machine.num_logical_cpus, machine.num_physical_cores) == (8, 4)
    assert machine.cpu_model == "Test CPU"
    assert machine.isa_flags == ("avx2", "fma", "f16c", "avx512f")
    assert machine.resident_bytes > 0


def test_hyper_threads_of_one_core_count_once(computer):
    assert read_machine(root=computer, affinity={0, 4}).num_physical_cores == 1
    assert read_machine(root=computer, affinity={0, 1, 4}).num_physical_cores == 2


def test_cpus_without_topology_count_as_cores(computer):
    assert read_machine(root=computer, affinity={20, 21}).num_physical_cores == 2


def test_cgroup_v2_limit_leaves_its_room_without_idle_page_cache(computer):
    write(
        computer,
        {
            "proc/self/cgroup": "0::/app\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/app/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/app/memory.current": f"{700 * 2**20}\n",
            "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {500 * 2**20}\nactive_file 7\n",
            "sys/fs/cgroup/app/cpu.max": "150000 100000\n",
        },
    )

    machine = read_machine(root=computer, affinity=set(range(8)))

    assert machine.available_bytes == GIB - 200 * 2**20
    assert "/sys/fs/cgroup/app/memory.max" in machine.available_because
    assert machine.cpu_quota.cpus == 1.5
    assert machine.cpu_quota.path == "/sys/fs/cgroup/app/cpu.max"


def test_tightest_level_of_the_hierarchy_counts(computer):
    write(
        computer,
        {
            "proc/self/cgroup": "0::/slice/app\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/slice/app/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/slice/app/memory.current": "1000\n",
            "sys/fs/cgroup/slice/app/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/slice/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/slice/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )

    machine = read_machine(root=computer, affinity={0})

    assert machine.memory_limit.path == "/sys/fs/cgroup/slice/memory.max"
    assert machine.available_bytes == GIB
    assert machine.cpu_quota.cpus == 2.5


def test_cgroup_v1_limits_are_read_per_controller(computer):
    write(
        computer,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "proc/self/mountinfo": (
                "31 23 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "32 23 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 4}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 8}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )

    machine = read_machine(root=computer, affinity={0})

    assert machine.available_bytes == GIB - GIB // 8
    assert machine.cpu_quota.cpus == 1.5


def test_cgroup_v1_without_limits_limits_nothing(computer):
    write(
        computer,
        {
            "proc/self/cgroup": "5:memory:/\n4:cpu:/\n0::/\n",
            "proc/self/mountinfo": (
                "31 23 0:28 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "32 23 0:29 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )

    machine = read_machine(root=computer, affinity={0})

    assert machine.memory_limit is None
    assert machine.cpu_quota is None
    assert machine.available_bytes == 12 * GIB


def test_group_outside_the_mounted_part_falls_back_to_the_mount_point(computer):
    """A container that sees the host's path of its group, but only its own folder mounted."""
    write(
        computer,
        {
            "proc/self/cgroup": "0::/../../kubepods/pod1\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )

    assert read_machine(root=computer, affinity={0}).available_bytes == 2 * GIB


def test_limit_above_what_is_free_does_not_invent_memory(computer):
    write(
        computer,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/memory.max": f"{64 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )

    assert read_machine(root=computer, affinity={0}).available_bytes == 12 * GIB


def test_usage_above_the_limit_leaves_nothing_rather_than_less(computer):
    write(
        computer,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": MOUNT_V2,
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        },
    )

    assert read_machine(root=computer, affinity={0}).available_bytes == 0


def test_machine_without_meminfo_says_what_is_missing(tmp_path):
    with pytest.raises(MachineError, match=r"proc/meminfo"):
        read_machine(root=tmp_path, affinity={0})


def test_this_machine_can_be_read():
    machine = read_machine()

    assert 0 < machine.available_bytes <= machine.total_bytes
    assert 1 <= machine.num_physical_cores <= machine.num_logical_cpus
