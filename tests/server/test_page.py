"""The page: what a browser sees of a server at work, and what the routes behind it let nobody do."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import octavo.server
from octavo.core.block_pool import CACHED
from octavo.core.snapshot import RequestView, Snapshot
from octavo.engine.advice import PoolFacts
from octavo.engine.live_view import LiveFrame
from octavo.server.settings import ServerSettings
from octavo.testing.browser import chromium_path, open_browser
from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import SMALL, ServerProcess

STATIC = Path(octavo.server.__file__).parent / "static"
WAIT_MS = 30_000
needs_browser = pytest.mark.skipif(chromium_path() is None, reason="no chromium is installed")


# ---- without a browser ----


@pytest.fixture
def local(tiny_model: str) -> Iterator[LocalServer]:
    with LocalServer(scripted_llm(tiny_model, lambda index: "words")) as server:
        yield server


def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline(local: LocalServer) -> None:
    page = httpx.get(f"{local.url}/")

    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon\w+=|\bstyle=|https?:", page.text)
    for name in re.findall(r'(?:src|href)="(static/[^"]+)"', page.text):
        assert httpx.get(f"{local.url}/{name}").status_code == 200


def test_every_file_of_the_page_is_small_and_only_asks_its_own_server() -> None:
    files = [file for file in STATIC.iterdir() if file.suffix in (".js", ".css", ".html")]
    assert len(files) > 8
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) <= 400, file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert (STATIC / imported).is_file()


@pytest.mark.parametrize(
    "path", ["/static/../settings.py", "/static/..%2fsettings.py", "/static/nothing.js", "/static/"]
)
def test_no_path_leads_out_of_the_static_files(local: LocalServer, path: str) -> None:
    answer = httpx.get(local.url + path)
    assert answer.status_code == 404 and "error" in answer.json()


def read_frame(url: str, **headers: str) -> dict:
    """Return the first snapshot of the live stream."""
    with httpx.stream("GET", f"{url}/live", headers=headers, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        return next(json.loads(line[5:]) for line in lines if line.startswith("data:"))


def test_the_stream_shows_the_pool_and_names_the_model_as_clients_do(local: LocalServer) -> None:
    frame = read_frame(local.url)
    assert frame["schema"] == "octavo.kv/1" and frame["model"] == "tiny"
    assert frame["num_blocks"] == local.llm.resolved.num_blocks and frame["shows_prompts"] is False


def test_the_stream_ends_when_the_server_drains(local: LocalServer) -> None:
    with httpx.stream("GET", f"{local.url}/live", timeout=30) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        local.llm._thread.drain()
        deadline_s = time.monotonic() + WAIT_MS / 1000
        for line in lines:
            if line == "event: end":
                return
            assert time.monotonic() < deadline_s, "the stream goes on"
    raise AssertionError("it was cut, without a word")


def test_with_a_key_the_page_opens_and_shows_nothing(tiny_model: str) -> None:
    settings = ServerSettings(api_key=("secret",))
    with LocalServer(scripted_llm(tiny_model, lambda index: "words"), settings) as server:
        assert httpx.get(f"{server.url}/").status_code == 200
        for path in ("/live", "/live/blocks/1", "/live/requests/x", "/plan", "/plan/form", "/metrics"):
            assert httpx.get(server.url + path).status_code == 401, path
        assert read_frame(server.url, Authorization="Bearer secret")["num_blocks"] > 0


def test_tenants_do_not_see_each_other(tiny_model: str) -> None:
    settings = ServerSettings(api_key=("one", "two"))
    with (
        LocalServer(scripted_llm(tiny_model, lambda index: "words"), settings) as server,
        httpx.stream("GET", f"{server.url}/live", headers={"Authorization": "Bearer one"}) as answer,
    ):
        assert answer.status_code == 403
        assert "--operator-key" in json.loads(answer.read())["error"]["message"]


def test_an_operator_key_is_what_the_live_view_wants(tiny_model: str) -> None:
    settings = ServerSettings(api_key=("one", "two"), operator_key="boss")
    with LocalServer(scripted_llm(tiny_model, lambda index: "words"), settings) as server:
        with httpx.stream("GET", f"{server.url}/live", headers={"Authorization": "Bearer one"}) as answer:
            assert answer.status_code == 401
        assert read_frame(server.url, Authorization="Bearer boss")["num_blocks"] > 0


def test_the_text_of_a_block_is_shown_only_if_the_server_was_told_to(tiny_model: str, local: LocalServer) -> None:
    body = {"model": "tiny", "prompt": "abcdefghijklmnopqrstuvwxyz", "max_tokens": 8}
    with LocalServer(scripted_llm(tiny_model, lambda index: "words"), ServerSettings(show_prompts=True)) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        texts = [httpx.get(f"{server.url}/live/blocks/{block}").json()["text"] for block in range(1, 5)]
        assert httpx.get(f"{server.url}/live/blocks/65").status_code == 404
        assert httpx.get(f"{server.url}/live/blocks/x").status_code in (400, 422)
        assert read_frame(server.url)["shows_prompts"] is True

    assert any("abcdefghij" in text for text in texts)
    assert httpx.get(f"{local.url}/live/blocks/1").json()["error"]["code"] == "prompts-hidden"


def test_the_plan_form_takes_no_files_and_shows_no_paths(tiny_model: str, local: LocalServer) -> None:
    plan = httpx.get(f"{local.url}/plan", timeout=30)

    assert plan.status_code == 200 and plan.json()["schema"] == "octavo.plan/1"
    assert plan.json()["model"] == "tiny" and tiny_model not in plan.text
    for words in ({"model": tiny_model}, {"model": "/etc/passwd"}, {"trace": "/etc/passwd"}, {"memory": "x" * 999},
                  {"memory": "24"}, {"nonsense": "1"}):  # fmt: skip
        answer = httpx.get(f"{local.url}/plan", params=words, timeout=30)
        assert answer.status_code in (400, 404) and "message" in answer.json()["error"], words
    form = httpx.get(f"{local.url}/plan/form").json()
    assert form["fields"][0]["name"] == "model" and form["fields"][0]["value"] == "tiny"


# ---- with a browser ----


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser) -> Iterator:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", lambda said: page.troubles.append(said.text) if said.type == "error" else None)
    yield page
    context.close()


def count(page, state: str) -> int:
    """Return how many blocks the legend counts in a state."""
    return int(page.inner_text(f"#legend li:has-text('{state}') b").replace(",", ""))


def wait_until(page, question) -> None:
    """Ask until it is so. Playwright's own wait evaluates text, which the page's policy forbids."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while not question():
        assert time.monotonic() < deadline_s, "it did not come"
        page.wait_for_timeout(50)


@needs_browser
def test_a_browser_sees_blocks_fill_a_prefix_shared_and_preemptions(page, tiny_model: str, tmp_path: Path) -> None:
    options = ("--threads", "1", "--num-blocks", "120", "--max-model-len", "1024")
    with ServerProcess(tiny_model, *options) as server:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        page.wait_for_selector("#status[data-state=live]")
        page.wait_for_selector("#requests-empty")
        assert (count(page, "free"), count(page, "in use")) == (120, 0)

        stop = threading.Event()

        def ask(index: int) -> None:
            body = {"model": "tiny", "prompt": [*range(20, 84), 100 + index], "max_tokens": 700, "ignore_eos": True}
            while not stop.is_set():
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        try:
            wait_until(page, lambda: page.locator("#requests tbody tr").count() >= 3)
            wait_until(page, lambda: count(page, "in use") > 0)
            wait_until(page, lambda: count(page, "shared") > 0)
            figure = page.locator("#tile-preemptions .figure")
            wait_until(page, lambda: float(figure.get_attribute("data-shown") or 0) > 0)
            page.wait_for_selector("#advice:not([hidden])")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.screenshot(path=tmp_path / f"{scheme}.png")

            def has_been_told_why() -> bool:
                # Again for another one, if the request has ended meanwhile and its row is gone.
                if page.locator("#requests .why").count() == 0:
                    page.locator("#requests tbody tr[tabindex]").last.dispatch_event("click")
                return page.locator("#requests .why p").count() >= 2

            wait_until(page, has_been_told_why)
            box = page.locator("#map-marks").bounding_box()
            page.mouse.move(box["x"] + 8, box["y"] + 8)
            assert page.inner_text("#tip").startswith("block 1")
            assert page.evaluate("window.octavo.frameTimes().length") > 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        page.wait_for_selector("#requests-empty:not([hidden])")

    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()
    assert {url.split("/")[2] for url in asked} == {server.url.split("/")[2]}, "works offline"
    assert page.troubles == []


def has_outline(page) -> bool:
    """Say whether any block of the map is outlined."""
    return page.evaluate(
        "(() => { const marks = document.getElementById('map-marks');"
        " return marks.getContext('2d').getImageData(0, 0, marks.width, marks.height).data.some(Boolean); })()"
    )


def is_seen_whole(page, selector: str) -> bool:
    """Say whether no sideways scrolling is needed to read what a selector finds."""
    return page.evaluate(
        "selector => [...document.querySelectorAll(selector)].every((one) => { const box = one.getBoundingClientRect();"
        " return box.width > 0 && box.left >= 0 && box.right <= innerWidth && one.scrollWidth <= one.clientWidth; })",
        selector,
    )


@needs_browser
def test_a_request_that_ends_while_it_is_read_stays_open_and_can_be_asked_for_again(page, tiny_model: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    with ServerProcess(tiny_model, *SMALL) as server:
        page.goto(server.url)
        page.wait_for_selector("#status[data-state=live]")
        stop = threading.Event()

        def ask() -> None:
            body = {"model": "tiny", "prompt": [*range(20, 84)], "max_tokens": 900, "ignore_eos": True, "stream": True}
            while not stop.is_set():
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                    for _ in answer.iter_lines():
                        if stop.is_set():
                            return

        thread = threading.Thread(target=ask)
        thread.start()
        try:

            def is_read_while_it_runs() -> bool:
                rows = page.locator("#requests tbody tr[tabindex]")
                if rows.count() == 0:
                    return False
                if page.locator("#requests .why").count() == 0:
                    rows.first.dispatch_event("click")
                    rows.first.dispatch_event("pointerenter")
                return page.locator("#requests .why p").count() >= 2 and has_outline(page)

            wait_until(page, is_read_while_it_runs)
            assert is_seen_whole(page, "#requests .why p")
        finally:
            stop.set()
            thread.join()
        page.wait_for_selector("#requests-empty:not([hidden])")
        page.wait_for_selector("#finished-list div.why p >> nth=1")
        assert is_seen_whole(page, "#finished-list p, #finished-list .finished-row")
        assert not has_outline(page), "it belongs to nothing any more"

        page.click("#finished-list li:has(.why) button")
        assert page.locator("#finished-list .why p").count() == 0
        page.click("#finished-list button >> nth=0")
        page.wait_for_selector("#finished-list .why p >> nth=1")
        assert "64 prompt tokens" in page.inner_text("#finished-list .why")
    assert page.troubles == []


@needs_browser
def test_the_page_reads_a_document_as_it_was_packed(page, local: LocalServer) -> None:
    holders = [0, 1, 2, 3, 18, 0, 1, 1, 2, 17]
    block_map = bytes(CACHED if index == 5 else count and count + 1 for index, count in enumerate(holders))
    tables = ((5, 9, 10), (10, 9, 8, 7, 2, 3), (0, 0, 4))
    views = tuple(
        RequestView(
            request_id=f"r{index}", status="running", num_prompt_tokens=40, num_output_tokens=0, num_computed_tokens=40,
            num_hit_tokens=0, num_preemptions=0, max_total_tokens=50, tables=(table,),
        )
        for index, table in enumerate(tables)
    )  # fmt: skip
    snapshot = Snapshot(block_size=16, num_usable_blocks=10, num_free_blocks=2, requests=views, block_map=block_map)
    frame = LiveFrame(
        model="tiny", block_bytes=1, facts=PoolFacts(num_blocks=10, block_size=16, max_num_seqs=4), now_s=1.0,
        snapshot=snapshot, copied=frozenset({9}), arrivals_s={}, empty_ratio=0.0, seconds=(), latency={},
    )  # fmt: skip

    page.goto(local.url)
    read = page.evaluate(
        "kv => import('./static/live.js').then(({ unpack }) => { const live = unpack(kv); return {"
        " states: [...live.blocks.states], holders: [...live.blocks.holders],"
        " tables: live.requests.map((one) => one.tables) }; })",
        frame.as_dict(),
    )

    assert read["states"] == [0, 2, 3, 3, 3, 1, 2, 2, 4, 3]
    assert read["holders"] == [0, 1, 2, 3, 17, 0, 1, 1, 0, 17]
    assert read["tables"] == [[list(table)] for table in tables]


@needs_browser
def test_the_page_explains_a_further_answer_and_a_near_miss(page, local: LocalServer) -> None:
    why = {
        "num_prompt_tokens": 40, "num_output_tokens": 3, "finish_reason": None, "num_copies": 1, "peak_blocks": 4,
        "hits": {"num_block_tokens": 32, "num_copied_tokens": 0, "num_missed_tokens": 8, "block_ids": [],
                 "copied_from": []},
        "near_miss": {"position": 35, "block_id": 7, "text": "<b>", "cached_text": "x"},
        "waits": [{"reason": "arrival", "seconds": 0.25}, {"reason": "tokens", "seconds": 0.001},
                  {"reason": "blocks", "seconds": 1.5}],
        "preemptions": [{"at_s": 2.0, "reason": "blocks", "for_request_id": "other", "num_blocks": 3,
                         "num_computed_tokens": 40, "num_recomputed_tokens": 9},
                        {"at_s": 3.0, "reason": "blocks", "for_request_id": "own", "num_blocks": 1,
                         "num_computed_tokens": 4, "num_recomputed_tokens": None}],
        "times": {"ttft_s": 1.75, "decode_s": 0.5, "e2e_s": None}, "request_id": "own", "mean_others_running": 2.5,
    }  # fmt: skip
    page.goto(local.url)

    def told(why: dict) -> list[str]:
        return page.evaluate(
            "why => import('./static/explain.js').then(({ sentences }) => sentences(why).map((words) =>"
            " words.map((word) => word.textContent ?? word).join('')))",
            why,
        )

    assert told({**why, "waits": [], "preemptions": []})[2] == (
        "No waits, no preemptions: at 250 ms a token, beside 2.50 others on average."
    )
    assert told(why) == [
        "32 of 40 prompt tokens were a hit (32 shared with the first answer); 8 computed.",
        "The nearest cached text (block 7) goes on differently from token 35 on: x there, <b> here.",
        "It waited 250 ms behind others, 1.50 s for blocks. It ran at 250 ms a token, beside 2.50 others on average.",
        "After 2.00 s it gave 3 blocks back because blocks ran out, to other; 9 tokens had to be computed again.",
        "After 3.00 s it gave 1 block back, since its own next token found none free.",
        "It held 4 blocks at most; 1 block copied.",
        "First token after 1.75 s; 3 output tokens.",
    ]


@needs_browser
def test_the_playground_shows_what_was_a_hit_and_takes_no_markup(page, tiny_model: str) -> None:
    said = "<img src=x onerror=alert(1)> & <b>bold</b>"
    with LocalServer(scripted_llm(tiny_model, lambda index: said)) as server:
        page.goto(f"{server.url}/#playground")
        page.wait_for_selector("#status[data-state=live]")
        for turn, words in enumerate(("<i>first question of this chat</i>", "and another"), start=1):
            page.fill("#message", words)
            page.press("#message", "Enter")
            page.wait_for_selector(f".turn-facts >> nth={turn - 1}")

        assert said in page.inner_text(".turn.assistant >> nth=0")
        assert page.inner_text(".turn.user >> nth=0") == "<i>first question of this chat</i>"
        assert page.locator(".turns img, .turns b, .turns i:not(.meter i)").count() == 0
        first, second = (page.inner_text(f".hit-facts >> nth={turn}") for turn in (0, 1))
        page.click(".why-button >> nth=1")
        page.wait_for_selector(".turn .why p >> nth=1")
        why = page.inner_text(".turn .why")
        page.click("#chat-reset")
        assert page.locator(".turn").count() == 0
    assert first.startswith("0 of ")
    (_, first_prompt), (hits, prompt) = (
        (int(number.replace(",", "")) for number in re.match(r"([\d,]+) of ([\d,]+)", line).groups())
        for line in (first, second)
    )
    assert first_prompt < hits < prompt, "the answer was sent again, too, and found"
    assert f"{hits:,} of {prompt:,} prompt tokens were a hit" in why and "It held" in why
    assert page.troubles == []


@needs_browser
def test_the_playground_says_why_an_answer_failed(page, tiny_model: str) -> None:
    with LocalServer(scripted_llm(tiny_model, lambda index: "words", max_model_len=128)) as server:
        page.goto(f"{server.url}/#playground")
        page.wait_for_selector("#status[data-state=live]")
        page.fill("#max-tokens", "100000")
        page.fill("#message", "hello")
        page.click("#send")
        page.wait_for_selector(".turn.failed")
        assert "128" in page.inner_text(".turn.failed")


@needs_browser
def test_a_key_is_asked_for_until_it_is_right(page, tiny_model: str) -> None:
    settings = ServerSettings(api_key=("secret",))
    with LocalServer(scripted_llm(tiny_model, lambda index: "words"), settings) as server:
        page.goto(server.url)
        for key in ("wrong", "secret"):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", key)
            page.press("#key", "Enter")
        page.wait_for_selector("#status[data-state=live]")
        page.reload()
        page.wait_for_selector("#status[data-state=live]")
        assert not page.is_visible("#key-dialog"), "kept for the tab"


@needs_browser
def test_a_tenant_is_told_that_the_view_is_closed_and_can_chat(page, tiny_model: str) -> None:
    settings = ServerSettings(api_key=("one", "two"))
    with LocalServer(scripted_llm(tiny_model, lambda index: "words"), settings) as server:
        page.goto(server.url)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "one")
        page.press("#key", "Enter")
        page.wait_for_selector("#status[data-state=lost]")
        assert "operator" in page.inner_text("#status")
        page.click("#tab-playground")
        page.fill("#message", "hello")
        page.press("#message", "Enter")
        page.wait_for_selector(".turn-facts")
        assert "words" in page.inner_text(".turn.assistant")


@needs_browser
def test_the_plan_tab_draws_a_plan(page, tiny_model: str) -> None:
    with LocalServer(scripted_llm(tiny_model, lambda index: "words")) as server:
        page.goto(server.url)
        page.click("#tab-plan")
        page.wait_for_selector("#plan-result .membar")
        page.fill("input[name=memory]", "1GiB")
        page.click("#plan-form button")
        page.wait_for_selector("#plan-form button:not([disabled])")
        assert "at once" in page.inner_text(".verdict")
        assert page.locator(".levers tbody tr").count() > 0
        page.select_option("select[name=model]", "meta-llama/Llama-3.1-70B")
        page.select_option("select[name=device]", "h100-sxm")
        for name, value in (("devices", "4"), ("memory", ""), ("lengths", "1155:211"), ("target_concurrency", "200")):
            page.fill(f"input[name={name}]", value)
        page.click("#plan-form button")
        page.wait_for_selector("#plan-result h2:has-text('What holds 200 requests at once')")
        assert "NVIDIA H100" in page.inner_text("#plan-result .note >> nth=0")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.locator(".levers").count() == 2
        assert is_seen_whole(page, ".levers, .levers tbody tr, .levers td:not(:empty)")
        page.fill("input[name=memory]", "24")
        page.click("#plan-form button")
        page.wait_for_selector("#plan-result .error")
        assert "24" in page.inner_text("#plan-result")
    assert all("400" in trouble for trouble in page.troubles)


@needs_browser
def test_it_reads_on_a_phone_and_comes_back_after_a_restart(page, tiny_model: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    with LocalServer(scripted_llm(tiny_model, lambda index: "words")) as server:
        page.goto(server.url)
        page.wait_for_selector("#status[data-state=live]")
        for tab in ("pool", "playground", "plan"):
            page.click(f"#tab-{tab}")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), tab
    page.wait_for_selector("#status[data-state=lost]")
