"""What a server holds on to after very many requests: memory, descriptors, records and series, as they level off.

    PYTHONPATH=src python benchmarks/soak.py [--requests 100000] [--in-flight 32] [--seed 0] [--json]

Short requests of a tiny model's server with 100 keys: completions and chats, streams and whole answers, one or two
answers, sampled and greedy, salts and request ids of their own, clients that leave at random times, wrong keys, bad
fields, prompts that are too long. After each twentieth of them the server comes to rest and is looked at. Fails if one
request is lost, if anything is left at rest, or if something still grows in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

from octavo.testing.load_client import Ask, Heard, get, send_all
from octavo.testing.server_process import ServerProcess
from octavo.testing.server_rest import read_metrics, wait_for_rest
from octavo.testing.tiny_models import TinyModel, write_hf_model

OPTIONS = ("--threads", "1", "--num-blocks", "128", "--max-model-len", "512")
NUM_KEYS = 100
NUM_SAMPLES = 20
OPERATOR = {"Authorization": "Bearer operator"}
LONGEST_LOOK_BACK = 4000
MAX_RECORDS = 1000
"""Finished answers of which the server keeps a record; a request may have two."""
MAX_GROWTH_BYTES = 8 * 1024 * 1024
"""Resident memory that the second half may add; allocators keep what a busy moment took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A server at rest.

    Args:
        oldest_record: How many requests ago, at most, one was that has a record still.
    """

    num_requests: int
    resident_bytes: int
    num_descriptors: int
    num_threads: int
    num_series: int
    oldest_record: int


def requests(random: Random) -> Iterator[Ask]:
    """Yield short requests without end."""
    while True:
        is_chat = random.random() < 0.2
        is_stream = random.random() < 0.5
        ids = [random.randrange(60, 400) for _ in range(random.randint(1, 40))]
        body: dict[str, object] = {"max_tokens": random.randint(1, 8), "stream": is_stream}
        body |= {"messages": [{"role": "user", "content": f"say {ids[:5]}"}]} if is_chat else {"prompt": ids}
        if random.random() < 0.5:
            body |= {"temperature": 0.0} if random.random() < 0.5 else {"seed": random.randrange(2**31), "top_k": 20}
        if random.random() < 0.1:
            body["n"] = 2
        if random.random() < 0.2:
            body["cache_salt"] = f"salt {random.randrange(10**9)}"
        if random.random() < 0.1:
            body["stop"] = [f"{random.randrange(100)}", "ab"]
        if random.random() < 0.03:
            body |= random.choice([{"max_tokens": 10_000}, {"no_such_field": 1}, {"model": f"m{random.random()}"}])
        headers = {"Authorization": f"Bearer key-{random.randrange(NUM_KEYS)}"}
        if random.random() < 0.02:
            headers["Authorization"] = f"Bearer {random.random()}"
        if random.random() < 0.5:
            headers["X-Request-Id"] = f"client-{random.randrange(10**9)}"
        yield Ask(
            body=body,
            path="/v1/chat/completions" if is_chat else "/v1/completions",
            headers=headers,
            leaves_after_s=random.uniform(0.0, 0.08) if random.random() < 0.1 else None,
        )


class Soak:
    """A load in rounds, and a look at the server after each.

    Args:
        server: Serves a tiny model.
        num_requests: In all.
        in_flight: At a time.
    """

    def __init__(self, server: ServerProcess, *, num_requests: int, in_flight: int, seed: int) -> None:
        self._server = server
        self._num_requests = num_requests
        self._in_flight = in_flight
        self._asks = requests(Random(seed))
        self._last_ids: deque[str] = deque(maxlen=LONGEST_LOOK_BACK)
        self.fates: Counter[str] = Counter()
        self.lost: list[str] = []
        self.samples: list[Sample] = []

    async def run(self) -> None:
        num_a_round = -(-self._num_requests // NUM_SAMPLES)
        for _ in range(NUM_SAMPLES):
            asks = list(islice(self._asks, num_a_round))
            await send_all(self._server.url, asks, max_in_flight=self._in_flight, on_done=self._note)
            await wait_for_rest(self._server.url, OPERATOR)
            self.samples.append(await self._look())
            print(_line(self.samples[-1]), file=sys.stderr, flush=True)

    def _note(self, heard: Heard) -> None:
        self.fates[heard.fate] += 1
        if heard.fate == "lost":
            self.lost.append(heard.why)
        if heard.fate == "answered" and heard.request_id is not None:
            self._last_ids.append(heard.request_id)

    async def _look(self) -> Sample:
        oldest = 0
        for ago in range(250, len(self._last_ids) + 1, 250):
            status, _ = await get(self._server.url, f"/requests/{self._last_ids[-ago]}", OPERATOR)
            oldest = ago if status == 200 else oldest
        process = Path("/proc", str(self._server.pid))
        status_lines = (process / "status").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in status_lines)
        return Sample(
            num_requests=self.fates.total(),
            resident_bytes=int(fields["VmRSS"].split()[0]) * 1024,
            num_descriptors=_count_descriptors(process / "fd"),
            num_threads=int(fields["Threads"]),
            num_series=len(await read_metrics(self._server.url, OPERATOR)),
            oldest_record=oldest,
        )


def _count_descriptors(folder: Path) -> int:
    """Count open files; the least of several looks, as this client's last connection may just be closing."""
    counts = []
    for _ in range(10):
        counts.append(len(list(folder.iterdir())))
        time.sleep(0.02)
    return min(counts)


def find_growth(samples: Sequence[Sample]) -> list[str]:
    """Return what still grew in the second half."""
    middle, last = samples[len(samples) // 2 - 1], samples[-1]
    found = []
    if last.resident_bytes - middle.resident_bytes > MAX_GROWTH_BYTES:
        found.append(f"memory by {(last.resident_bytes - middle.resident_bytes) / 2**20:.1f} MiB")
    found += [
        f"{name} from {getattr(middle, name)} to {getattr(last, name)}"
        for name in ("num_descriptors", "num_threads", "num_series")
        if getattr(last, name) > getattr(middle, name)
    ]
    if last.oldest_record > MAX_RECORDS:
        found.append(f"records, of {last.oldest_record} requests ago")
    return found


def _line(sample: Sample) -> str:
    return (
        f"{sample.num_requests:>9,}{sample.resident_bytes / 2**20:>11.1f}{sample.num_descriptors:>13}"
        f"{sample.num_threads:>9}{sample.num_series:>8}{sample.oldest_record:>15,}"
    )


def main() -> int:
    """Run and report; 1 if a request was lost or something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    parser.add_argument("--in-flight", type=int, default=32, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    print(f"{'requests':>9}{'memory MiB':>11}{'descriptors':>13}{'threads':>9}{'series':>8}{'oldest record':>15}",
          file=sys.stderr)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_hf_model(TinyModel(), Path(folder) / "tiny"))
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(f"key-{index}" for index in range(NUM_KEYS)), encoding="utf-8")
        with ServerProcess(
            model, *OPTIONS, "--api-key-file", str(keys), "--operator-key", "operator", "--quiet"
        ) as server:
            soak = Soak(server, num_requests=asked.requests, in_flight=asked.in_flight, seed=asked.seed)
            start_s = time.monotonic()
            asyncio.run(soak.run())
            duration_s = time.monotonic() - start_s
    grown = find_growth(soak.samples)
    document = {
        "schema": "octavo.soak/1",
        "duration_s": round(duration_s, 1),
        "fates": dict(soak.fates),
        "lost": soak.lost[:20],
        "grown": grown,
        "samples": [asdict(sample) for sample in soak.samples],
    }
    if asked.json:
        print(json.dumps(document))
    else:
        ends = ", ".join(f"{count:,} {fate}" for fate, count in soak.fates.most_common())
        print(f"{duration_s:.0f} s: {ends}; still growing: {', '.join(grown) or 'nothing'}")
    return 1 if grown or soak.lost else 0


if __name__ == "__main__":
    sys.exit(main())
