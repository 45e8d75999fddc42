"""The kernels run clean under the compiler's sanitizers: memory, arithmetic, threads. Minutes of compiling."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.sh"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_run_clean_under_a_sanitizer(sanitizer):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")

    run = subprocess.run(["sh", str(SCRIPT), sanitizer], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "checks passed" in run.stdout
