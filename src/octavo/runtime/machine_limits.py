"""The machine's limits, measured in a process of their own with as many BLAS threads as kernels get.

How many threads NumPy's BLAS uses is settled when it is loaded, so this process cannot change its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

from octavo.errors import MachineError
from octavo.runtime.linear_speed import MachineLimits, measure_limits

_BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def limits_with_threads(threads: int) -> MachineLimits:
    """Measure matrix product and memory read with so many threads; takes about two seconds and 0.5 GiB.

    Raises:
        MachineError: the process that measures failed.
    """
    done = subprocess.run(  # noqa: S603 - this interpreter, with a number
        [sys.executable, "-m", "octavo.runtime.machine_limits", str(threads)],
        env={**os.environ, **dict.fromkeys(_BLAS_VARIABLES, str(threads))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise MachineError("the machine's limits could not be measured", because=last_line or f"rc {done.returncode}")
    return MachineLimits(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_limits(int(sys.argv[1])))))  # noqa: T201 - the parent process reads it
