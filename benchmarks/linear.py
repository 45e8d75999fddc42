"""Speed of the native matrix products against the machine's limits, measured in the same run.

python benchmarks/linear.py [--threads 2] [--kinds q4_1,q8_0,f32] [--rows 1,16,256] [--narrow] [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from octavo.runtime.linear_speed import measure_limits, measure_linear

SMOLLM2 = {
    "qkv": (960, 576),
    "attention output": (576, 576),
    "gate, up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
ONE_BILLION = {"1B gate, up": (16384, 2048), "1B down": (2048, 8192)}
FEW_ROWS = 4
COLD_BYTES = 300 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="q4_1,q8_0,f16,f32")
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--narrow", action="store_true", help="do not use kernels of a wider instruction set")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()

    limits = measure_limits(options.threads)
    speeds = {}
    for kind in options.kinds.split(","):
        for name, shape in {**SMOLLM2, **ONE_BILLION}.items():
            if kind.endswith("_k") and shape[1] % 256:
                continue
            for num_rows in map(int, options.rows.split(",")):
                cold = COLD_BYTES if num_rows <= FEW_ROWS else 0
                speeds[kind, name, num_rows] = measure_linear(
                    kind,
                    [shape],
                    num_rows,
                    options.threads,
                    min_weight_bytes=cold,
                    isa="avx2" if options.narrow else "auto",
                )
    if options.json:
        rows = [{"name": name, **asdict(speed)} for (_, name, _), speed in speeds.items()]
        print(json.dumps({"schema": "octavo.bench.linear/1", "limits": asdict(limits), "products": rows}))
        return
    print(f"{options.threads} threads; float32 product in NumPy {limits.sgemm_flops / 1e9:.0f} GFLOP/s, ", end="")
    print(f"memory read {limits.read_bytes_per_s / 1e9:.1f} GB/s; in brackets the share of these limits")
    print(f"Up to {FEW_ROWS} rows every product reads weights from memory, above from wherever they are")
    for (kind, name, num_rows), speed in speeds.items():
        print(
            f"{kind:5} {speed.kernels:8} {name:16} {num_rows:4} rows {speed.flops / 1e9:7.1f} GFLOP/s "
            f"({speed.flops / limits.sgemm_flops:4.2f}) {speed.bytes_per_s / 1e9:6.1f} GB/s "
            f"({speed.bytes_per_s / limits.read_bytes_per_s:4.2f})"
        )


if __name__ == "__main__":
    main()
