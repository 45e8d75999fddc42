"""`octavo generate`, run as a person runs it: arguments in, stdout and stderr out."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.testing.tiny_models import TinyModel, write_hf_model

SMALL = ("--max-model-len", "128", "--num-blocks", "48", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny")))


def test_one_prompt_streams_its_answer_and_nothing_else_to_stdout(model: str, octavo) -> None:
    done = octavo("generate", model, "-p", "hello", "--max-tokens", "8", "--ignore-eos", *SMALL)

    assert done.code == 0, done.err
    assert done.out.endswith("\n") and "loading" not in done.out
    assert "--max-tokens 8" in done.err, "an answer cut by the limit says so"


def test_quiet_says_nothing_but_the_answer(model: str, octavo) -> None:
    done = octavo("generate", model, "-p", "hello", "--max-tokens", "4", "-q", *SMALL)
    assert (done.code, done.err) == (0, "")


def test_json_is_one_document_with_the_promised_fields(model: str, octavo) -> None:
    args = ("-p", "ab", "-p", "cd", "-n", "2", "--max-tokens", "5", "--ignore-eos", "--logprobs", "2", "--json")
    done = octavo("generate", model, *args, "--temperature", "1", "--seed", "3", *SMALL)

    document = json.loads(done.out)
    assert document["schema"] == "octavo.generate/1"
    assert [(o["prompt_index"], o["index"]) for o in document["outputs"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for output in document["outputs"]:
        assert set(output) == {"prompt_index", "index", "text", "token_ids", "finish_reason", "logprobs"}
        assert len(output["token_ids"]) == len(output["logprobs"]) == 5
        assert output["finish_reason"] == "length"
    assert set(document["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert document["usage"]["completion_tokens"] == 20


def test_prompt_scores_are_in_the_json(model: str, octavo) -> None:
    done = octavo("generate", model, "-p", "abcd", "--max-tokens", "1", "--prompt-logprobs", "1", "--json", *SMALL)

    scores = json.loads(done.out)["prompt_logprobs"]
    assert len(scores) == 1 and scores[0][0] is None and len(scores[0]) > 1
    assert all(entry["logprob"] <= 0 for entry in scores[0][1:])


def test_a_prompt_can_come_from_a_file_or_stdin(model: str, octavo, tmp_path: Path, monkeypatch) -> None:
    text = "grüße, 你好 🙂"
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    args = ("--max-tokens", "6", "--json", *SMALL)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    runs = [
        octavo("generate", model, "-p", text, *args),
        octavo("generate", model, "--prompt-file", str(path), *args),
        octavo("generate", model, "--prompt-file", "-", *args),
    ]

    assert len({run.out for run in runs}) == 1 and runs[0].code == 0


def test_a_chat_uses_the_models_template(model: str, octavo) -> None:
    plain, chat = (
        json.loads(octavo("generate", model, "-p", "hi", "--max-tokens", "2", "--json", *flags, *SMALL).out)
        for flags in ((), ("--chat",))
    )
    assert chat["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "--prompt"),
        (("--prompt-file", "no-such-file"), 1, "no-such-file"),
        (("-p", "x", "--temperature", "nan"), 2, "temperature"),
        (("-p", "x", "--logit-bias", "A:1"), 2, "--logit-bias 42:-5"),
        (("-p", "x", "--max-tokens", "100000"), 3, "ask for at most"),
        (("-p", "x", "--max-model-len", "100000"), 2, "--max-model-len"),
        (("-p", "x", "--num-blocks", "2"), 3, "longest that fits"),
        (("-p", "x", "--kv-cache-dtype", "fp8_e5m2"), 2, "fp8_e5m2"),
        (("-p", "x", "--mx-tokens", "1"), 2, "did you mean --max-tokens"),
    ],
)
def test_bad_input_gets_one_clear_error_and_the_right_exit_code(
    model: str, octavo, args: tuple[str, ...], code: int, words: str
) -> None:
    done = octavo("generate", model, "--max-model-len", "128", *args)

    assert done.code == code, done.err
    assert done.out == ""
    message = done.err
    assert "Traceback" not in message and "error[" in message and words in message


@pytest.mark.parametrize("allocator", ["paged", "reserved"])
def test_show_kv_draws_the_blocks_of_the_allocator(model: str, octavo, allocator: str) -> None:
    args = ("-p", "a prompt that fills two blocks or so", "-n", "3", "--max-tokens", "20", "--ignore-eos")
    done = octavo("generate", model, *args, "--show-kv", "--kv-allocator", allocator, *SMALL)

    picture = done.err
    assert done.code == 0, picture
    assert f"{allocator} allocator, blocks of 16 tokens" in picture
    pool = next(line for line in picture.splitlines() if line.startswith("pool")).split()
    filled, held, shared, empty = (int(number.replace(",", "")) for number in pool[-4:])
    assert held * 16 == filled + empty
    assert (shared > 0) == (allocator == "paged"), "three answers share their prompt's blocks when paged"


def test_recorded_events_tell_the_whole_story_without_text(model: str, octavo, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    done = octavo("generate", model, "-p", "secret", "--max-tokens", "20", "--ignore-eos", "--record-events", str(path),
                  *SMALL)  # fmt: skip

    assert done.code == 0, done.err
    header, *events = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["schema"] == "octavo.events/1" and header["num_blocks"] == 48
    kinds = [event["event"] for event in events]
    assert kinds[0] == "RequestArrived" and kinds[-1] == "RequestFinished"
    assert kinds.count("StepScheduled") == 20
    assert "secret" not in path.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_events_that_cannot_be_written_are_one_error_and_one_document(model: str, octavo) -> None:
    args = ("-p", "x", "--max-tokens", "2", "--record-events", "/dev/full", "--json")
    done = octavo("generate", model, *args, *SMALL)

    assert done.code == 1 and "/dev/full: cannot be written" in done.err
    assert json.loads(done.out)["schema"] == "octavo.error/1"


def test_a_path_for_events_that_cannot_be_opened_is_refused_before_loading(octavo) -> None:
    done = octavo("generate", "no/such/model", "-p", "x", "--record-events", "/no/such/folder/events.jsonl")
    assert done.code == 1 and "/no/such/folder/events.jsonl" in done.err


@pytest.mark.parametrize("args", [("--logprobs", "1"), ("--logit-bias", "5:1", "--logit-bias", "5:2")])
def test_what_would_be_dropped_is_refused(model: str, octavo, args: tuple[str, ...]) -> None:
    done = octavo("generate", model, "-p", "x", *args, *SMALL)
    assert done.code == 2 and args[0] in done.err


def test_an_answer_can_be_held_to_a_structure(model: str, octavo, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [["one", 2]]}', encoding="utf-8")

    for args, texts in (
        (("--json-schema", str(schema)), None),
        (("--regex", "a[bc]d"), {"abd", "acd"}),
        (("--choice", "yes", "--choice", "no"), {"yes", "no"}),
    ):
        done = octavo("generate", model, "-p", "x", "--max-tokens", "90", "--temperature", "9", *args, *SMALL)
        assert done.code == 0, done.err
        if texts is None:
            assert json.loads(done.out) == ["one", 2]
        else:
            assert done.out.strip() in texts


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--regex", "(a"), "unclosed group"),
        (("--regex", "a", "--choice", "b"), "--regex: given together with --choice"),
        (("--json-schema", "/"), "/ is a folder"),
        (("--json-schema", __file__), "not JSON"),
        (("--choice", "a", "--ignore-eos"), "contradicts structured output"),
    ],
    ids=str,
)
def test_a_structure_that_cannot_be_followed_is_a_usage_error(model: str, octavo, args: tuple, said: str) -> None:
    done = octavo("generate", model, "-p", "x", *args, *SMALL)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


def test_ctrl_c_is_one_clean_line(tmp_path: Path) -> None:
    model = str(write_hf_model(TinyModel(max_position=16_384), tmp_path))
    args = ("-p", "x", "--max-tokens", "12000", "--ignore-eos", "--runner", "reference", "--logit-bias", "100:100")
    # The pipe holds less than the answer, so that the command cannot end before the signal comes.
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "generate", model, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=4096,
    )
    assert process.stdout is not None
    assert process.stdout.read(1), "the answer has begun"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == 130
    assert stderr.decode().splitlines()[-1] == "interrupted"
    assert "Traceback" not in stderr.decode()
