"""`octavo top`: a server's pool in the terminal, once and as a document; and what it says when there is none."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from octavo.cli import top
from octavo.cli.live_document import EMPTY, SHARED, expand, read_live
from octavo.cli.top_view import draw
from octavo.core.block_pool import CACHED
from octavo.core.snapshot import RequestView, Snapshot
from octavo.engine.advice import PoolFacts
from octavo.engine.live_frame import LiveFrame
from octavo.errors import MachineError
from octavo.server.settings import ServerSettings
from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.tiny_models import TinyModel, write_hf_model

FACTS = PoolFacts(num_blocks=11, block_size=16, max_num_seqs=4)
LATENCIES = dict.fromkeys(("ttft_s", "itl_s", "queue_s", "e2e_s"), (0.1, 0.2, None))


def make_frame(**changes) -> LiveFrame:
    """Return a moment: two running requests that share two blocks, one that waits, a cached block."""

    def view(request_id: str, status: str, *table: int) -> RequestView:
        return RequestView(
            request_id=request_id, status=status, num_prompt_tokens=40, num_output_tokens=7, num_computed_tokens=46,
            num_hit_tokens=32, num_preemptions=0, max_total_tokens=100, wait_reason=None if table else "blocks",
            tables=(table,) if table else (),
        )  # fmt: skip

    views = (view("one", "running", 1, 2, 5), view("two", "running", 1, 2, 7, 6), view("three", "waiting"))
    snapshot = Snapshot(
        block_size=16,
        num_usable_blocks=11,
        num_free_blocks=6,
        requests=views,
        block_map=bytes([3, 3, CACHED, 0, 2, 2, 2, 0, 0, 0, 0]),
    )
    fields = {
        "model": "tiny", "block_bytes": 4096, "facts": FACTS, "now_s": 9.0, "snapshot": snapshot, "copied": frozenset(),
        "arrivals_s": {"one": 3.0, "two": 4.0, "three": 8.5}, "empty_ratio": 0.1, "seconds": (), "latency": LATENCIES,
    }  # fmt: skip
    return LiveFrame(**{**fields, **changes})


def drawn(document: dict, *, width: int = 100, height: int | None = None) -> str:
    console = Console(width=width, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(draw(read_live(document), width=width, height=height))
        return console.export_text()


def test_a_document_is_read_back_as_it_was_packed() -> None:
    document = make_frame().as_dict()
    pool = read_live(json.loads(json.dumps(document)))

    assert list(pool.states) == [SHARED, SHARED, CACHED, EMPTY, 2, 2, 2, EMPTY, EMPTY, EMPTY, EMPTY]
    assert [[expand(runs) for runs in one["tables"] or ()] for one in document["requests"]] == [
        [[1, 2, 5]],
        [[1, 2, 7, 6]],
        [],
    ]
    assert expand([9, -3, 0, 2, 4, 1]) == [9, 8, 7, 0, 0, 4]


def test_the_picture_shows_each_state_and_each_request() -> None:
    text = drawn(make_frame().as_dict())

    assert "▓▓░·███····" in text
    assert "shared 2" in text and "cached 1" in text and "free 5" in text and "in use 3" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()[:1] in (["one"], ["two"], ["three"])}
    assert "▓▓█" in rows["one"] and "6.0 s" in rows["one"] and "32" in rows["one"]
    assert "▓▓██" in rows["two"] and "waits for blocks" in rows["three"]
    assert "0.100 s" in text and re.search(r"0\.200 s +-", text)


def test_what_does_not_fit_is_counted() -> None:
    views = [
        RequestView(
            request_id=f"r{index}", status="waiting", num_prompt_tokens=1, num_output_tokens=0, num_computed_tokens=0,
            num_hit_tokens=0, num_preemptions=0, max_total_tokens=2,
        )
        for index in range(300)
    ]  # fmt: skip
    snapshot = Snapshot(block_size=16, num_usable_blocks=100_000, num_free_blocks=100_000, requests=tuple(views),
                        block_map=bytes(100_000))  # fmt: skip
    text = drawn(make_frame(snapshot=snapshot).as_dict(), width=80, height=40)

    assert len(text.splitlines()) <= 40
    shown = len(re.findall(r"^r\d+ ", text, re.MULTILINE))
    assert 0 < shown < 300 and f"{300 - shown} more" in text


def test_a_server_cannot_steer_the_terminal() -> None:
    text = drawn(make_frame(model="\x1b]0;pwned\x07\x1b[2J").as_dict())
    assert "\x1b" not in text and "\x07" not in text and "pwned" in text


@pytest.mark.parametrize(
    "document",
    [
        None,
        {"schema": "octavo.kv/2"},
        {"schema": "octavo.kv/1"},
        {"schema": "octavo.kv/1", "num_blocks": 100, "blocks": {"states": b64encode(b"ab").decode()}},
    ],
)
def test_what_is_no_document_is_one_clear_error(document) -> None:
    with pytest.raises(MachineError):
        read_live(document)


# ---- a server ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = write_hf_model(TinyModel(), tmp_path_factory.mktemp("models") / "tiny")
    settings = ServerSettings(api_key=("secret",))
    with LocalServer(scripted_llm(folder, lambda index: "words"), settings) as running:
        yield running


def test_one_moment_is_drawn_or_written_as_a_document(octavo, server: LocalServer) -> None:
    picture = octavo("top", server.url, "--once", "--api-key", "secret")
    document = octavo("top", server.url, "--once", "--json", "--api-key", "secret")

    assert picture.code == 0 and "octavo tiny: 64 blocks of 16 tokens" in picture.out and "nothing runs" in picture.out
    assert document.code == 0 and json.loads(document.out)["schema"] == "octavo.kv/1"


def test_the_address_of_the_api_is_taken_as_well(octavo, server: LocalServer) -> None:
    ran = octavo("top", f"{server.url}/v1/", "--once", "--json", "--api-key", "secret")
    assert ran.code == 0 and json.loads(ran.out)["schema"] == "octavo.kv/1"


def test_a_missing_key_is_explained(octavo, server: LocalServer) -> None:
    ran = octavo("top", server.url, "--once")
    assert ran.code == 1 and "401" in ran.err and "--api-key" in ran.err


def test_the_key_may_come_from_the_environment(octavo, server: LocalServer, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert octavo("top", server.url, "--once", "--json").code == 0


def test_the_end_of_the_server_is_told(octavo, tmp_path) -> None:
    llm = scripted_llm(write_hf_model(TinyModel(), tmp_path / "tiny"), lambda index: "words")
    with LocalServer(llm) as server:
        timer = threading.Timer(1.0, llm._thread.drain)
        timer.start()
        ran = octavo("top", server.url, "--json")
        timer.join()

    assert ran.code == 1 and "has ended the stream" in ran.err
    assert len(ran.out.splitlines()) >= 2, "documents, then the error's"


def test_answers_to_one_prompt_are_told_apart() -> None:
    frame = make_frame()
    views = [
        replace(view, request_id=f"chatcmpl-0123456789abcdef/{index}")
        for index, view in enumerate(frame.snapshot.requests)
    ]
    text = drawn(make_frame(snapshot=replace(frame.snapshot, requests=tuple(views))).as_dict())
    assert all(f"chatcmpl-01234567…/{index} " in text for index in range(3))


def test_no_server_is_one_clear_error(octavo) -> None:
    ran = octavo("top", "http://127.0.0.1:9", "--once")
    assert ran.code == 1 and "no octavo server at 127.0.0.1:9" in ran.err and "octavo serve" in ran.err


@contextlib.contextmanager
def other_server(*pieces: bytes, ends: bool = True) -> Iterator[str]:
    """Something that takes one connection, reads a request, and sends these pieces as they are."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = threading.Event()

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(10_000)
                    for piece in pieces:
                        connection.sendall(piece)
                    if not ends:
                        done.wait(20)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
FRAME = b"event: kv\ndata: " + json.dumps(make_frame().as_dict()).encode() + b"\n\n"
NO_SERVERS = {
    "a 404": ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",), "no octavo server"),
    "a page": ((b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>hello</html>",), "no octavo server"),
    "no HTTP": ((b"SSH-2.0-OpenSSH_9.2\r\n",), "no octavo server"),
    "nothing": ((), "no octavo server"),
    "an error without words": ((b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\noh!",), "answers 500"),
    "half an error": ((b"HTTP/1.1 500 Oh\r\nContent-Length: 300\r\n\r\noh!",), "no octavo server"),
    "no JSON": ((STREAM, b"event: kv\ndata: {hello\n\n"), "cannot be read"),
    "another document": ((STREAM, b'event: kv\ndata: {"schema": "octavo.kv/9"}\n\n'), "octavo.kv/9"),
    "a cut chunk": ((STREAM.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ne"),), "broke off"),
    "a silent end": ((STREAM, b"event: other\ndata: 1\n\n"), "has ended the stream"),
}


@pytest.mark.parametrize("name", NO_SERVERS)
def test_what_is_no_octavo_server_is_told_apart(octavo, name: str) -> None:
    pieces, words = NO_SERVERS[name]
    with other_server(*pieces) as url:
        ran = octavo("top", url, "--once")
    assert ran.code == 1 and words in ran.err and "Traceback" not in ran.err, ran.err


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((), "does not answer"),
        ((b"HTTP/1.1 200 OK\r\n",), "does not answer"),
        ((b"HTTP/1.1 500 Oh\r\nContent-Length: 300\r\n\r\noh!",), "does not answer"),
        ((STREAM,), "fallen silent"),
        ((STREAM, FRAME), "fallen silent"),
    ],
)
def test_a_server_that_falls_silent_is_not_waited_for(octavo, monkeypatch, pieces, words: str) -> None:
    monkeypatch.setattr(top, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(top, "SILENCE_TIMEOUT_S", 0.5)
    with other_server(*pieces, ends=False) as url:
        ran = octavo("top", url, "--json")
    assert ran.code == 1 and words in ran.err, ran.err
    assert len(ran.out.splitlines()) == 1 + (FRAME in pieces), "documents, then the error's"


def test_a_server_that_goes_away_meanwhile_is_told(octavo) -> None:
    chunked = STREAM.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    with other_server(chunked, b"%x\r\n" % len(FRAME) + FRAME + b"\r\n") as url:
        ran = octavo("top", url)
    assert ran.code == 1 and "broke off" in ran.err and "octavo tiny" in ran.out


def test_a_wrong_key_is_explained(octavo, server: LocalServer) -> None:
    ran = octavo("top", server.url, "--once", "--api-key", "other")
    assert ran.code == 1 and "401" in ran.err and "the key is wrong" in ran.err


@pytest.mark.parametrize("key", ["€", "a b", "a\nX: y"])
def test_a_key_that_no_header_can_hold_is_refused(octavo, server: LocalServer, key: str) -> None:
    ran = octavo("top", server.url, "--once", "--api-key", key)
    assert ran.code == 2 and "--api-key" in ran.err
