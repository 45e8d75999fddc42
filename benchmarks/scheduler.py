"""What the scheduler costs: microseconds per step, with many running and many waiting, and the share of hashing.

    PYTHONPATH=src python benchmarks/scheduler.py [--json]

No model and no runner: steps are scheduled and committed with a token made up, so that only the core is measured. Each
figure is the median of the steps of one run, in which requests of 200 prompt tokens (half of them a shared prefix) come
and go at a steady number; blocks of 16 tokens, 512 tokens a step at 32 running and 4,096 at 256.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

from octavo.core.block import BlockHash
from octavo.core.block_hash import chain_hash, root_key
from octavo.core.content import TokenContent
from octavo.core.events import EventLog, RequestAdmitted
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampledToken, StepPlan, StepResult
from octavo.units import RequestId, TokenId

NUM_PROMPT_TOKENS = 200
NUM_OUTPUT_TOKENS = 100


class TimedHash:
    """Counts the time spent in the hash function."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_calls = 0

    def __call__(self, parent: bytes, tokens: bytes) -> BlockHash:
        start = time.perf_counter()
        result = chain_hash(parent, tokens)
        self.seconds += time.perf_counter() - start
        self.num_calls += 1
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One line of the card."""

    num_running: int
    num_waiting: int
    num_steps: int
    step_us: float
    schedule_us: float
    commit_us: float
    per_request_us: float
    add_us: float
    hash_ratio: float
    hit_ratio: float


class Load:
    """Keeps a number of requests running and a number waiting."""

    def __init__(self, num_running: int, num_waiting: int) -> None:
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.hash = TimedHash()
        self.events = EventLog()
        num_tokens = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
        budget = 16 * num_running
        kv_cache = PagedKVCache(
            num_running * (num_tokens // 16 + 2),
            16,
            max_chunk_tokens=budget,
            events=self.events,
            hash_function=self.hash,
        )
        limits = Limits(max_model_len=num_tokens, max_num_seqs=num_running, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(kv_cache, limits, events=self.events)
        self.root = root_key(b"benchmark", None)
        self.params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS)
        self.num_added = 0
        self.num_admitted_tokens = 0
        self.num_hit_tokens = 0
        self.add_times: list[float] = []

    def refill(self) -> None:
        """Add requests until the wanted number is unfinished."""
        while self.scheduler.num_running + self.scheduler.num_waiting < self.num_running + max(1, self.num_waiting):
            number = self.num_added
            shared = range(NUM_PROMPT_TOKENS // 2)
            own = (1_000 + (number * 7 + offset) % 30_000 for offset in range(NUM_PROMPT_TOKENS // 2))
            content = TokenContent([*shared, *own])
            start = time.perf_counter()
            request = Request(RequestId(f"r{number}"), content, self.params, root=self.root)
            self.scheduler.add(request)
            self.add_times.append(time.perf_counter() - start)
            self.num_added += 1

    def measure(self, num_steps: int) -> Figures:
        self.refill()
        for _ in range(2 * NUM_OUTPUT_TOKENS):  # until arrivals are spread over time
            self.step()
        self.hash.seconds = 0.0
        times = [self.step() for _ in range(num_steps)]
        schedule_us, commit_us = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
        total_s = sum(map(sum, times))
        return Figures(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_steps=num_steps,
            step_us=schedule_us + commit_us,
            schedule_us=schedule_us,
            commit_us=commit_us,
            per_request_us=(schedule_us + commit_us) / self.num_running,
            add_us=1e6 * statistics.median(self.add_times),
            hash_ratio=self.hash.seconds / total_s,
            hit_ratio=self.num_hit_tokens / self.num_admitted_tokens,
        )

    def step(self) -> tuple[float, float]:
        """Do one step; return the seconds of `schedule` and `commit`."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        result = made_up_result(plan)
        executed = time.perf_counter()
        self.scheduler.commit(plan, result)
        committed = time.perf_counter()
        self.refill()
        admitted = [event for event in self.events.drain() if isinstance(event, RequestAdmitted)]
        self.num_admitted_tokens += sum(event.num_known_tokens for event in admitted)
        self.num_hit_tokens += sum(event.num_block_hit_tokens + event.num_copied_hit_tokens for event in admitted)
        return scheduled - start, committed - executed


def made_up_result(plan: StepPlan) -> StepResult:
    samples = tuple(SampledToken(request_id=row.request_id, token_id=TokenId(row.position)) for row in plan.samples)
    return StepResult(step=plan.step, samples=samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps measured per line")
    parser.add_argument("--json", action="store_true", help="print figures for machines")
    options = parser.parse_args()
    figures = [
        Load(num_running, num_waiting).measure(options.steps)
        for num_running, num_waiting in ((32, 0), (32, 100_000), (256, 0), (256, 100_000))
    ]
    if options.json:
        print(json.dumps({"schema": "octavo.bench.scheduler/1", "lines": [asdict(line) for line in figures]}))
        return
    print("running  waiting   step us  schedule  commit  per request  add us  hashing  hits")
    for line in figures:
        print(
            f"{line.num_running:>7}  {line.num_waiting:>7,}  {line.step_us:>8,.0f}  {line.schedule_us:>8,.0f}  "
            f"{line.commit_us:>6,.0f}  {line.per_request_us:>11.1f}  {line.add_us:>6.1f}  {line.hash_ratio:>7.1%}  "
            f"{line.hit_ratio:>4.0%}"
        )


if __name__ == "__main__":
    main()
