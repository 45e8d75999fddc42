"""`/metrics`: counts that agree with what requests say of themselves, gauges that come to rest, names that are kept."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.core.events import EventLog
from octavo.core.sampling import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest
from octavo.errors import InvalidParameterError, RequestTooLongError
from octavo.server.histogram import Histogram
from octavo.server.metrics_export import MetricsExport
from octavo.server.metrics_fold import MetricsFold
from octavo.server.metrics_table import METRICS, PoolUse
from octavo.server.settings import ServerSettings
from octavo.testing.factories import CoreSetup, make_runner, make_scheduler
from octavo.testing.scripted_llm import LocalServer, scripted_llm

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0

VLLM_NAMES = {
    # What vLLM 0.12 exports, from its documentation (design/metrics, usage/metrics), as Prometheus shows the names.
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "e2e_request_latency_seconds",
    "request_prompt_tokens", "request_generation_tokens",
}  # fmt: skip


class QuarterClock:
    """A quarter of a second passes each time somebody asks."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 0.25
        return self._now_s


class Watched:
    """An engine over a tight pool, and the fold that listens to it."""

    def __init__(self, **setup) -> None:
        self.setup = CoreSetup(**{"num_blocks": 16, "block_size": 4, "max_model_len": 60, **setup})
        events = EventLog()
        self.scheduler = make_scheduler(self.setup, events)
        self.engine = Engine(
            self.scheduler,
            make_runner(self.setup),
            events=events,
            clock=QuarterClock(),
            vocab_size=self.setup.vocab_size,
            seed=1,
        )
        self.engine.start_metrics(keeps_finished=False)
        self.fold = MetricsFold()
        self.engine.subscribe(
            lambda events: self.fold.take(events, self.engine.request_times, block_size=self.setup.block_size)
        )

    def add(self, request_id: str, prompt, **params) -> None:
        asked = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
        self.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=asked))


def test_counts_agree_with_what_every_answer_says_of_itself() -> None:
    watched, random = Watched(), Random(4)
    engine, fold = watched.engine, watched.fold
    shared = [random.randrange(1000) for _ in range(11)]
    deltas, num_accepted, num_prompt = [], 0, 0
    for index in range(60):
        prompt = [
            *(shared if random.random() < 0.6 else []),
            *(random.randrange(1000) for _ in range(random.randint(1, 12))),
        ]
        n = random.choice((1, 1, 3))
        watched.add(f"r{index}", prompt, max_tokens=random.randint(1, 20), n=n)
        num_accepted, num_prompt = num_accepted + n, num_prompt + len(prompt)
        for _ in range(random.randint(0, 4)):
            deltas += engine.step()
        if random.random() < 0.1:
            engine.abort(f"r{index}")
    while engine.has_unfinished:
        deltas += engine.step()

    ends = [delta for delta in deltas if delta.finish_reason is not None]
    num_output = sum(len(delta.token_ids) for delta in deltas)
    assert sum(fold.num_preemptions.values()) > 5 and fold.num_copies > 0 and fold.num_copied_hit_tokens > 0
    assert fold.num_block_hit_tokens > 0 and fold.eviction_idle_steps.count > 0 and fold.num_near_misses > 0
    assert fold.num_finished["abort"] > 0 and sum(fold.num_recomputed_tokens.values()) > 0
    assert sum(fold.num_finished.values()) == len(ends) == num_accepted
    assert fold.num_output_tokens == num_output == fold.request_output_tokens.sum
    assert fold.num_prompt_tokens == fold.request_prompt_tokens.sum <= num_prompt
    assert sum(fold.num_recomputed_tokens.values()) == engine.metrics.num_recomputed_tokens
    assert fold.num_block_hit_tokens + fold.num_copied_hit_tokens <= sum(end.num_cached_tokens for end in ends)
    assert fold.num_query_tokens == fold.num_prompt_tokens
    assert fold.num_computed_tokens == engine.metrics.num_computed_tokens and fold.num_steps == engine.metrics.num_steps
    assert fold.ttft_s.count + fold.inter_token_s.count == num_output
    assert fold.e2e_s.count == num_accepted
    assert fold.queue_s.sum > 0 and 0 < fold.prefill_s.sum < fold.e2e_s.sum


def test_gauges_say_who_runs_and_why_others_wait_and_come_to_rest() -> None:
    watched = Watched(max_num_seqs=2, num_blocks=12)
    for index in range(4):
        watched.add(f"r{index}", range(100 * index, 100 * index + 9), max_tokens=30)

    assert watched.fold.num_waiting["arrival"] == 4 and watched.fold.num_running == 0
    watched.engine.step()
    assert watched.fold.num_running == 2
    assert watched.fold.num_waiting["seats"] == 1 and sum(watched.fold.num_waiting.values()) == 2
    while sum(watched.fold.num_preemptions.values()) == 0:
        watched.engine.step()
    assert watched.fold.num_waiting["preempted"] + watched.fold.num_waiting["blocks"] >= 1
    assert 0 < watched.fold.empty_ratio < 1
    for index in range(4):
        watched.engine.abort(f"r{index}")

    assert watched.fold.num_running == 0 and set(watched.fold.num_waiting.values()) == {0}
    assert watched.fold.empty_ratio == 0.0
    assert watched.fold._unfinished == {}, "nothing is kept of requests that have ended"


def test_a_refused_request_is_counted_and_leaves_no_trace() -> None:
    watched = Watched()
    with pytest.raises(RequestTooLongError):
        watched.add("long", range(59), max_tokens=30)

    assert watched.fold.num_rejected["too_long"] == 1
    assert sum(watched.fold.num_waiting.values()) == 0


def test_times_of_one_answer_add_up() -> None:
    watched = Watched()
    watched.add("a", range(6), max_tokens=5)
    while watched.engine.has_unfinished:
        watched.engine.step()

    fold = watched.fold
    assert fold.queue_s.sum + fold.prefill_s.sum == fold.ttft_s.sum
    assert fold.prefill_s.sum + fold.decode_s.sum == fold.inference_s.sum
    assert fold.inter_token_s.sum == fold.decode_s.sum and fold.inter_token_s.count == 4
    assert fold.mean_inter_token_s.sum == fold.decode_s.sum / 4
    assert fold.ttft_s.sum + fold.decode_s.sum <= fold.e2e_s.sum


def test_buckets_are_cumulative_and_hold_their_upper_ends() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 99):
        histogram.observe(value)

    assert histogram.buckets() == [("1", 2), ("2", 3), ("5", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum) == (5, 107.0)


# ---- names ----


def export(prefix: str = "octavo") -> dict[str, object]:
    """Return every sample of a fresh server by name."""
    pool = PoolUse(num_referenced_blocks=3, num_cached_blocks=2, num_free_blocks=5, block_size=16, block_bytes=1024)
    text, _ = MetricsExport(MetricsFold(), lambda: pool, model="tiny", prefix=prefix).render("")
    families = text_string_to_metric_families(text.decode())
    return {sample.name: sample for family in families for sample in family.samples}


def test_every_metric_of_the_table_is_exported() -> None:
    names = set(export())
    for metric in METRICS:
        ending = {"gauge": "", "counter": "_total", "histogram": "_bucket"}[metric.kind]
        assert f"octavo_{metric.name}{ending}" in names


def test_the_docs_are_what_the_table_says() -> None:
    spec = importlib.util.spec_from_file_location("write_metrics_docs", ROOT / "scripts" / "write_metrics_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert (ROOT / "docs" / "metrics.md").read_text() == module.metrics_docs(), "run `make docs`"


def test_the_grafana_board_asks_only_for_what_is_exported() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    asked = {name for query in queries for name in re.findall(r"octavo_\w+", query)}

    assert len(queries) > 30 and asked <= set(export())
    for metric in METRICS:
        has_twin = metric.name in ("kv_blocks", "kv_bytes", "prefix_near_misses")
        assert has_twin or metric.vllm or any(name.startswith(f"octavo_{metric.name}") for name in asked), metric.name
    labels = {
        label for query in queries for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")
    }
    assert labels <= {"le", *(metric.label for metric in METRICS)}


def test_vllms_names_are_vllms() -> None:
    names = {name for name in export("vllm") if name.startswith("vllm:")}
    stems = {re.sub(r"_(bucket|sum|count|created)$", "", name.removeprefix("vllm:")) for name in names}

    assert stems == VLLM_NAMES
    sample = export("vllm")["vllm:kv_cache_usage_perc"]
    assert sample.labels == {"model_name": "tiny", "engine": "0"} and sample.value == 0.3
    assert export("vllm")["vllm:request_success_total"].labels.keys() == {"model_name", "engine", "finished_reason"}
    assert "octavo_kv_blocks" in export("vllm") and "octavo_requests_running" not in export("vllm")


def test_another_prefix_names_everything_and_a_bad_one_is_refused() -> None:
    assert all(name.startswith("acme_") for name in export("acme"))
    with pytest.raises(InvalidParameterError, match="metrics-prefix"):
        export("9 lives")


# ---- a server ----


def scrape(url: str) -> dict[str, float]:
    """Return every sample by its name and labels."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for sample in samples
        if sample.name != "octavo_info"
    }


def wait_for(question: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.01)


def ask(url: str, **body) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions",
        json={"model": "tiny", "prompt": list(range(20, 60)), "max_tokens": 8, **body},
        timeout=WAIT_S,
    )


@pytest.fixture
def local(tiny_model: str) -> Iterator[LocalServer]:
    with LocalServer(scripted_llm(tiny_model, lambda index: "a few words that are said")) as server:
        yield server


def test_a_scrape_follows_a_request_and_no_series_is_added(local: LocalServer) -> None:
    before = scrape(local.url)
    assert ask(local.url).status_code == 200
    assert ask(local.url, n=2).json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert ask(local.url, max_tokens=5000).status_code == 400

    after = scrape(local.url)
    assert set(after) == set(before), "labels are fixed sets"
    assert after["octavo_requests_finished_total{length}"] == 3
    assert after["octavo_requests_rejected_total{too_long}"] in (0, 1), "the door may refuse it before the engine does"
    assert after["octavo_output_tokens_total"] == 24 and after["octavo_prompt_tokens_total"] == 80
    assert after["octavo_prefix_hit_tokens_total{block}"] + after["octavo_prefix_hit_tokens_total{copied}"] == 39
    assert after["octavo_kv_blocks{cached}"] > 0 == after["octavo_kv_blocks{referenced}"]
    assert after["octavo_requests_running"] == after["octavo_kv_usage_ratio"] == 0


def test_what_is_refused_before_the_engine_sees_it_is_counted(tiny_model: str) -> None:
    llm = scripted_llm(tiny_model, lambda index: "words", max_num_seqs=1, max_waiting=1)
    with LocalServer(llm) as server:
        llm.runner.gate.clear()
        threads = [threading.Thread(target=ask, args=(server.url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: llm.health.num_running + llm.health.num_waiting == 2)
            assert ask(server.url).status_code == 429
        finally:
            llm.runner.gate.set()
            for thread in threads:
                thread.join()
        llm._thread.drain()
        assert ask(server.url).status_code == 503

        after = scrape(server.url)
    assert after["octavo_requests_rejected_total{queue_full}"] == after["octavo_requests_rejected_total{stopping}"] == 1


def test_it_answers_while_a_step_hangs(local: LocalServer) -> None:
    local.llm.runner.gate.clear()
    thread = threading.Thread(target=ask, args=(local.url,))
    thread.start()
    try:
        wait_for(lambda: scrape(local.url)["octavo_requests_running"] == 1)
    finally:
        local.llm.runner.gate.set()
        thread.join()
    assert scrape(local.url)["octavo_requests_running"] == 0


def test_a_client_that_goes_leaves_the_gauges_at_rest(local: LocalServer) -> None:
    local.llm.runner.pause_s = 0.02
    body = {"model": "tiny", "prompt": [30] * 50, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{local.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: the client hangs up when its iterator is dropped
        next(lines)
        wait_for(lambda: scrape(local.url)["octavo_requests_running"] == 1)

    wait_for(lambda: scrape(local.url)["octavo_requests_finished_total{abort}"] == 1)
    after = scrape(local.url)
    assert after["octavo_requests_running"] == 0 and after["octavo_kv_blocks{referenced}"] == 0
    assert after["octavo_e2e_seconds_count"] == 1


def test_open_metrics_are_given_where_they_are_asked_for(local: LocalServer) -> None:
    answer = httpx.get(f"{local.url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_keys_and_the_vllm_prefix_hold_for_a_server(tiny_model: str) -> None:
    settings = ServerSettings(api_key=("secret",), metrics_prefix="vllm", served_model_name=("shown",))
    with LocalServer(scripted_llm(tiny_model, lambda index: "words"), settings) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        answer = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer secret"})
    assert 'vllm:num_requests_running{engine="0",model_name="shown"} 0.0' in answer.text
