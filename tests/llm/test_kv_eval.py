"""`octavo eval kv`: variants of the cache against float32 keys and values, on the same weights."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from octavo.cli.eval_kv_chart import chart
from octavo.cli.main import run as run_command
from octavo.config.engine import EngineConfig
from octavo.errors import InvalidParameterError, ModelNumbersError
from octavo.llm.kv_eval import KVEvaluation, KVEvaluator, PasskeyResult, Way, bundled_text, recommend
from octavo.llm.passkey import MAX_ANSWER_TOKENS, make_passkey
from octavo.models.load import open_model
from octavo.runtime.divergence import Divergence, log_softmax
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.text_runner import CHUNK_TOKENS
from octavo.testing.dense_model import DenseModel
from octavo.testing.tiny_models import TinyModel, make_tensors, write_hf_model, write_safetensors

NUM_TOKENS = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf_model(TinyModel(), tmp_path_factory.mktemp("eval") / "tiny")


@pytest.fixture(scope="module")
def evaluation(folder) -> KVEvaluation:
    evaluator = KVEvaluator(EngineConfig(model=str(folder), weight_dtype="f32"), bundled_text(), max_tokens=NUM_TOKENS)
    return evaluator.evaluate(
        [Way(kv_cache_dtype=dtype) for dtype in ("f32", "f16", "bf16", "int8", "fp8_e4m3", "int4")]
    )


def test_exact_keys_and_values_cost_nothing_and_fewer_bits_cost_more(evaluation):
    exact, half, brain, *quantised = evaluation.variants

    assert (exact.whole.kl_mean, exact.whole.kl_p99, exact.whole.top1_agreement_ratio) == (0.0, 0.0, 1.0)
    assert exact.whole.perplexity == exact.whole.exact_perplexity
    assert 0.0 < half.whole.kl_mean < brain.whole.kl_mean < 0.01
    assert exact.bytes_per_token == 2 * half.bytes_per_token == 2 * brain.bytes_per_token
    # Two layers, two KV heads of width 16, keys and values: 8 rows a token, each with a scale of 2 bytes.
    assert [each.bytes_per_token for each in quantised] == [8 * (16 + 2), 8 * (16 + 2), 8 * (8 + 2)]
    int8, fp8, int4 = (each.whole.kl_mean for each in quantised)
    assert brain.whole.kl_mean < int8 < fp8 < int4


def test_perplexity_is_that_of_a_model_without_a_cache(folder, evaluation):
    token_ids = load_tokenizer(open_model(folder)).encode(bundled_text(), add_special_tokens=True)[:NUM_TOKENS]
    logprobs = log_softmax(DenseModel.load(folder).logits(token_ids))
    nll = -logprobs[np.arange(NUM_TOKENS - 1), token_ids[1:]]

    assert evaluation.num_positions == NUM_TOKENS - 1
    assert evaluation.variants[0].whole.perplexity == pytest.approx(float(np.exp(nll.mean())), rel=1e-5)


def test_buckets_cover_every_position_once_up_to_the_end(evaluation):
    for variant in evaluation.variants:
        ends = [(each.first_position, each.last_position) for each in variant.buckets]
        assert ends[0][0] == 0 and ends[-1][1] == NUM_TOKENS - 2
        assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(ends))
        sizes = [each.summary.num_positions for each in variant.buckets]
        mean = np.average([each.summary.kl_mean for each in variant.buckets], weights=sizes)
        assert variant.whole.kl_mean == pytest.approx(float(mean))


def test_the_smallest_variant_within_the_budget_is_recommended(evaluation):
    exact, half, brain = evaluation.variants[:3]

    assert recommend(replace(evaluation, variants=(exact, half, brain)), 1.0) is half, "equal bytes: the nearer one"
    assert recommend(evaluation, half.whole.kl_mean) is half
    assert recommend(evaluation, half.whole.kl_mean / 2) is exact
    assert recommend(evaluation, 100.0).way.kv_cache_dtype == "int4"
    assert recommend(replace(evaluation, variants=(half, brain)), 0.0) is None


def test_a_passkey_is_hidden_once_at_its_depth_and_the_prompt_has_its_length(folder):
    tokenizer = load_tokenizer(open_model(folder))
    filler = tokenizer.encode(bundled_text(), add_special_tokens=False)[:2000]

    keys = set()
    for length in (512, 1024):
        for depth in (0.1, 0.5, 0.9):
            passkey = make_passkey(tokenizer, filler, length_tokens=length, depth_ratio=depth)
            text = tokenizer.decode(list(passkey.token_ids))
            assert len(passkey.token_ids) == length
            assert text.count(f"The pass key is {passkey.key}.") == 1 and text.endswith("The pass key is")
            assert text.index(passkey.key) / len(text) == pytest.approx(depth, abs=0.15)
            keys.add(passkey.key)
    assert len(keys) == 6, "no answer can come from another prompt"


def test_divergence_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    exact, found = (rng.standard_normal((50, 20)).astype(np.float32) for _ in range(2))
    divergence = Divergence()
    divergence.add(log_softmax(exact), log_softmax(found), [1] * 50)

    p, q = (np.exp(each.astype(np.float64)) for each in (exact, found))
    p /= p.sum(axis=1, keepdims=True)
    q /= q.sum(axis=1, keepdims=True)
    kl = (p * np.log(p / q)).sum(axis=1)
    summary = divergence.summary()
    assert summary.kl_mean == pytest.approx(kl.mean())
    assert summary.kl_p99 == pytest.approx(np.quantile(kl, 0.99))
    assert summary.top1_agreement_ratio == np.mean(p.argmax(axis=1) == q.argmax(axis=1))


def test_a_row_that_is_no_distribution_is_infinitely_far_from_any():
    logits = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)
    broken = logits.copy()
    broken[1], broken[2, 3] = np.nan, np.inf
    divergence = Divergence()
    divergence.add(log_softmax(logits), log_softmax(broken), [1, 2, 3, 4])

    whole, first = divergence.summary(), divergence.summary(0, 1)
    assert (whole.kl_mean, whole.kl_p99, whole.perplexity) == (np.inf, np.inf, np.inf)
    assert whole.top1_agreement_ratio == 0.5
    assert first.kl_mean == 0.0 and first.perplexity == first.exact_perplexity


@pytest.fixture(scope="module")
def loud_folder(tmp_path_factory):
    """Values beyond what a 16-bit float holds, which the output projection makes small again."""
    tensors = make_tensors(TinyModel())
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] *= np.float32(1 << 22)
        if name.endswith("o_proj.weight"):
            tensors[name] /= np.float32(1 << 22)
    return write_hf_model(TinyModel(), tmp_path_factory.mktemp("eval") / "loud", tensors=tensors)


def test_a_dtype_that_cannot_hold_the_values_has_no_price_and_is_not_recommended(loud_folder, tmp_path, capsys):
    report = tmp_path / "kv.html"
    args = ["--max-tokens", "300", "--kv-cache-dtype", "f16,int8", "--budget-kl", "1", "--report", str(report)]

    assert run_command(["eval", "kv", str(loud_folder), *args, "--json"]) == 0

    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    half, int8 = document["variants"]
    for prices in (half, *half["buckets"]):
        assert prices["kl_mean"] is prices["kl_p99"] is prices["perplexity"] is prices["perplexity_ratio"] is None
        assert prices["top1_agreement_ratio"] == 0.0
    assert half["decode_tokens_per_s"] is None and half["passkeys"]
    assert 0.0 < int8["kl_mean"] < 0.01 and document["recommended"] == "int8"
    page = report.read_text(encoding="utf-8")
    assert page.count("<polyline") == 1 and "f16: after some tokens the model says nothing" in page
    assert run_command(["eval", "kv", str(loud_folder), *args, "--no-passkeys"]) == 0
    assert "f16: after some tokens the model says nothing" in capsys.readouterr().out


def test_what_the_model_itself_finds_stands_beside_what_the_variants_find(folder, monkeypatch, capsys, tmp_path):
    asked = []

    def ask(_self, runner, passkey, _advance):
        asked.append(runner)
        is_found = runner is asked[0]  # variants are asked before the exact runner
        return PasskeyResult(length_tokens=len(passkey.token_ids), depth_ratio=passkey.depth_ratio, is_found=is_found)

    monkeypatch.setattr(KVEvaluator, "_ask", ask)
    report = tmp_path / "kv.html"
    args = ["--max-tokens", "150", "--kv-cache-dtype", "int8", "--report", str(report)]

    assert run_command(["eval", "kv", str(folder), *args]) == 0

    shown = capsys.readouterr().out.split("Hidden numbers found again")[1]
    assert re.search(r"f32 \(exact\) +no no no\nint8 +yes yes yes\n", shown)
    page = report.read_text(encoding="utf-8").split("Hidden numbers found again")[1]
    assert f"<td>f32 (exact)</td>{'<td>no</td>' * 3}</tr><tr><td>int8</td>{'<td>yes</td>' * 3}" in page


def test_a_model_without_numbers_is_no_fault_of_a_cache(tmp_path):
    tensors = make_tensors(TinyModel())
    tensors["model.norm.weight"][:] = np.nan
    broken = write_hf_model(TinyModel(), tmp_path / "broken", tensors=tensors)
    evaluator = KVEvaluator(EngineConfig(model=str(broken)), bundled_text(), max_tokens=100)

    with pytest.raises(ModelNumbersError, match="with f32 keys and values"):
        evaluator.evaluate([Way(kv_cache_dtype="int8")])


def test_nothing_is_read_beyond_the_last_position_that_a_model_learned(tmp_path):
    limit = 160
    evaluator = KVEvaluator(EngineConfig(model=str(write_gpt2(tmp_path / "gpt2", limit))), bundled_text())

    (variant,) = evaluator.evaluate([Way(kv_cache_dtype="f16")]).variants

    assert len(evaluator.token_ids) == limit and variant.buckets[-1].last_position == limit - 2
    assert max(each.length_tokens for each in variant.passkeys) == limit - MAX_ANSWER_TOKENS
    assert variant.decode_tokens_per_s > 0


def write_gpt2(folder, num_positions):
    """Write a random GPT-2, whose positions are rows of a table."""
    folder = write_hf_model(TinyModel(), folder)
    width, vocab_size = 32, TinyModel().vocab_size
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab_size, "n_embd": width,
        "n_layer": 1, "n_head": 2, "n_positions": num_positions, "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new", "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"wte.weight": (vocab_size, width), "wpe.weight": (num_positions, width)}
    for name, outputs, inputs in (
        ("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
        ("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width),
    ):  # fmt: skip
        shapes |= {f"h.0.{name}.weight": (inputs, outputs), f"h.0.{name}.bias": (outputs,)}
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    rng = np.random.default_rng(0)
    tensors = {
        f"transformer.{name}": rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("option", ["--attention-window", "--sparse-blocks"])
def test_a_way_that_does_not_suit_the_model_is_refused_before_weights_are_loaded(option, tmp_path, capsys):
    windowed = write_hf_model(TinyModel(architecture="mistral", sliding_window=64), tmp_path / "windowed")

    assert run_command(["eval", "kv", str(windowed), option, "64"]) == 2

    said = capsys.readouterr().err
    assert f"leave out {option}" in said and "loading" not in said


def test_a_text_too_short_is_refused(folder):
    config = EngineConfig(model=str(folder))
    with pytest.raises(InvalidParameterError, match=r"--text.*at least 8 are needed"):
        KVEvaluator(config, "x")
    with pytest.raises(InvalidParameterError, match=r"--max-tokens.*7 tokens are too few"):
        KVEvaluator(config, bundled_text(), max_tokens=7)
    with pytest.raises(InvalidParameterError, match=r"--max-tokens.*99,999 tokens cannot be read") as caught:
        KVEvaluator(config, bundled_text(), max_tokens=99_999)
    assert "the model's limit" in str(caught.value)


def test_a_last_token_that_stands_alone_in_its_chunk_has_nothing_to_predict(folder):
    evaluator = KVEvaluator(EngineConfig(model=str(folder)), bundled_text(), max_tokens=CHUNK_TOKENS + 1)

    evaluation = evaluator.evaluate([Way(kv_cache_dtype="f32")], has_passkeys=False)

    assert evaluation.num_positions == CHUNK_TOKENS
    assert evaluation.variants[0].whole.num_positions == CHUNK_TOKENS


def test_the_bundled_text_is_long_enough():
    assert len(bundled_text().encode()) >= 200_000


def test_the_command_writes_its_document_and_a_page(folder, tmp_path, capsys):
    report = tmp_path / "kv.html"
    args = ["--max-tokens", "200", "--kv-cache-dtype", "f16,bf16", "--budget-kl", "1", "--report", str(report)]

    assert run_command(["eval", "kv", str(folder), *args, "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "octavo.eval.kv/1"
    assert [each["kv_cache_dtype"] for each in document["variants"]] == ["f16", "bf16"]
    fields = {"bytes_per_token", "kl_mean", "kl_p99", "top1_agreement_ratio", "perplexity", "perplexity_ratio"}
    for variant in document["variants"]:
        assert fields <= variant.keys() and all(
            fields - {"bytes_per_token"} <= each.keys() for each in variant["buckets"]
        )
    assert document["recommended"] == "f16"
    page = report.read_text(encoding="utf-8")
    assert page.count("<polyline") == 2 and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_names_of_lines_stand_apart_however_close_the_lines_end():
    bucket = {"first_position": 0, "last_position": 99}
    variants = [
        {
            "label": f"int8, {number} tiles", "kv_cache_dtype": "int8", "attention_window": None,
            "sparse_blocks": number, "buckets": [{**bucket, "kl_mean": kl}],
        }
        for number, kl in enumerate([1e-12] * 12 + [0.01] * 12)
    ]  # fmt: skip
    svg = chart(variants)
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])
    tops = sorted(float(top) for top in re.findall(r'y="([\d.]+)">int8, \d+ tiles<', svg))

    assert len(tops) == 24 and tops[0] > 0 and tops[-1] < height
    assert min(np.diff(tops)) >= 13, "pixels of the letters"


def test_the_command_shows_a_table(folder, capsys):
    args = ["--max-tokens", "150", "--kv-cache-dtype", "f16", "--no-passkeys", "--budget-kl", "0"]
    args += ["--attention-window", "64", "--sparse-blocks", "3,4"]

    assert run_command(["eval", "kv", str(folder), *args]) == 0

    shown = capsys.readouterr().out
    assert all(label in shown for label in ("f16, window 64", "f16, 3 tiles", "f16, 4 tiles"))
    assert "KL mean" in shown and "No variant stays within" in shown and "Hidden numbers" not in shown


def test_windows_and_sparse_reading_are_priced_and_cost_nothing_where_they_leave_nothing_out(tmp_path):
    deep = write_hf_model(TinyModel(num_layers=4), tmp_path / "deep")  # the first two layers are never sparse
    evaluator = KVEvaluator(EngineConfig(model=str(deep), weight_dtype="f32"), bundled_text(), max_tokens=300)
    windows = [Way(kv_cache_dtype="f32", attention_window=each) for each in (80, 400)]
    tiles = [Way(kv_cache_dtype="f32", sparse_blocks=each) for each in (4, 19)]

    narrow, wide, few, whole = evaluator.evaluate([*windows, *tiles], has_passkeys=False).variants

    assert narrow.buckets[0].summary.kl_mean == 0.0, "the first 84 tokens see everything"
    assert narrow.buckets[-1].summary.kl_mean > 0.001
    assert few.buckets[-1].summary.kl_mean > 0.001
    assert wide.whole.kl_mean == whole.whole.kl_mean == 0.0
    assert few.bytes_per_token > narrow.bytes_per_token, "bounds are counted"
    assert [each.way.label for each in (narrow, few)] == ["f32, window 80", "f32, 4 tiles"]
