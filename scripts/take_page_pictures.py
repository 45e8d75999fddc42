"""Takes the pictures of the page that the README shows: a real server, a real model, a pool that is a little short.

    python scripts/take_page_pictures.py          # needs chromium; fetches smollm2-135m if it is not here

Some thirty clients of one imagined library ask at once. Most share a long system prompt (the orange blocks), some do
not; answers grow until blocks run out and some are preempted.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from pathlib import Path

import httpx

from octavo.testing.browser import open_browser
from octavo.testing.server_process import ServerProcess

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MAX_BYTES = 250_000
SIZE = {"width": 1280, "height": 960}
OPTIONS = ("smollm2-135m", "--num-blocks", "320", "--max-model-len", "1024", "--max-num-seqs", "32")
SYSTEM = (
    "You answer for the town's library, in plain and friendly sentences. You never name a book that is not in the"
    " catalogue, and you say so when you are not sure. The library opens at nine and closes at seven, on Saturdays at"
    " four. Cards cost nothing for those who live here; guests pay five a year. Books are lent for four weeks, and for"
    " four more if nobody waits for them; films and games for one. Late books cost ten cents a day, three at most."
    " There is a reading hour for children on Wednesdays at three, an evening for mending bicycles and radios on the"
    " first Friday, and a quiet room upstairs, where nobody speaks and the tea is free. "
) * 2
QUESTIONS = (
    "Which books about sailing would you suggest to a beginner?",
    "How do I get a card if I moved here last week?",
    "My son is six. Is there something for him on Wednesday?",
    "I lost a book. What happens now?",
    "Can I keep a novel for two months?",
    "Explain to a librarian what a KV cache is.",
    "Write a poem about the quiet room.",
    "Tell me a story about a book that came back after fifty years.",
)


def ask_for_ever(url: str, client: int, stop: threading.Event) -> None:
    """Ask one question after another, as one client would."""
    chance = random.Random(client)
    for turn in itertools.count():
        if stop.is_set():
            return
        messages = [{"role": "user", "content": chance.choice(QUESTIONS) + f" ({client}.{turn})"}]
        if chance.random() < 0.7:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        body = {
            "model": "smollm2-135m",
            "messages": messages,
            "max_completion_tokens": chance.randint(120, 420),
            "temperature": 0.8,
            "n": 2 if chance.random() < 0.1 else 1,
        }
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)


def take(num_clients: int, seconds: float) -> None:
    """Write docs/images/dashboard-light.png and -dark.png."""
    IMAGES.mkdir(exist_ok=True)
    stop = threading.Event()
    with ServerProcess(*OPTIONS) as server, open_browser() as browser:
        pages = {}
        for scheme in ("light", "dark"):
            pages[scheme] = browser.new_page(viewport=SIZE, color_scheme=scheme)
            pages[scheme].goto(server.url)
        clients = [
            threading.Thread(target=ask_for_ever, args=(server.url, client, stop), daemon=True)
            for client in range(num_clients)
        ]
        for client in clients:
            client.start()
            pages["light"].wait_for_timeout(400)
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            pages["light"].wait_for_timeout(500)
        for scheme, page in pages.items():
            path = IMAGES / f"dashboard-{scheme}.png"
            page.screenshot(path=path)
            slowest_ms = max(page.evaluate("octavo.frameTimes()"))
            print(f"{path}: {path.stat().st_size:,} bytes; map drawn in at most {slowest_ms:.1f} ms")
            assert path.stat().st_size < MAX_BYTES
        stop.set()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=34)
    parser.add_argument("--seconds", type=float, default=75.0)
    args = parser.parse_args()
    take(args.clients, args.seconds)
