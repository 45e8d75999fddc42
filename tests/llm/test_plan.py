"""What is planned is what starts: every byte, every block, and the longest request that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.config.sources import Source, keyword_source
from octavo.errors import CapacityError, InvalidParameterError, ModelNotFoundError, OctavoError, UnsupportedModelError
from octavo.llm.find_subject import find_subject
from octavo.llm.plan import plan_document, plan_for
from octavo.models.load import open_model
from octavo.models.packaged_sizes import PACKAGED_SIZES
from octavo.models.weights import WeightSource
from octavo.planner.question import PlanQuestion, question_from
from octavo.runtime.native_weights import pack_weights
from octavo.testing.real_model import find_real_model
from octavo.testing.tiny_models import TinyModel, write_hf_model

GIB = 2**30
MIB = 2**20

READ_AHEAD_BYTES = 64
"""Mapped behind the last block, since kernels fetch one cache line further than they read."""

CASES = [
    pytest.param(TinyModel(), {"memory": "200MiB"}, id="llama"),
    pytest.param(TinyModel(architecture="qwen2", num_kv_heads=1), {"memory": "150MiB", "block_size": 32}, id="qwen2"),
    pytest.param(
        TinyModel(architecture="mistral", sliding_window=96, num_layers=3),
        {"memory": "120MiB", "max_num_batched_tokens": 64},
        id="windows",
    ),
    pytest.param(
        TinyModel(architecture="qwen3", head_dim=32, tie_embeddings=True),
        {"num_blocks": 77, "weight_dtype": "int8", "kv_cache_dtype": "f32"},
        id="int8 weights",
    ),
    pytest.param(TinyModel(), {"memory": "200MiB", "runner": "reference"}, id="reference"),
    pytest.param(
        TinyModel(), {"kv_cache_memory": "5MiB", "kv_allocator": "reserved", "max_model_len": 100}, id="reserved"
    ),
    pytest.param(
        TinyModel(num_layers=4), {"num_blocks": 50, "kv_cache_dtype": "int4", "runner": "reference"}, id="int4 cache"
    ),
    pytest.param(
        TinyModel(num_layers=4),
        {"memory": "150MiB", "kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0, 3), "runner": "reference"},
        id="int8 cache with two layers in 16 bits",
    ),
    pytest.param(
        TinyModel(architecture="mistral", sliding_window=32, num_layers=3),
        {"kv_cache_memory": "300KiB", "kv_allocator": "reserved", "max_num_batched_tokens": 64},
        id="reserved windows",
    ),
    pytest.param(
        TinyModel(num_layers=3),
        {"memory": "120MiB", "max_num_batched_tokens": 64, "attention_window": 100, "attention_sinks": 20},
        id="a window and sinks",
    ),
    pytest.param(
        TinyModel(num_layers=4),
        {"memory": "120MiB", "max_num_batched_tokens": 64, "sparse_blocks": 8, "kv_cache_dtype": "int8"},
        id="sparse reading",
    ),
    pytest.param(TinyModel(), {"memory": "120MiB", "block_size": 10}, id="blocks that only the reference takes"),
]


@pytest.mark.parametrize(("model", "options"), CASES)
def test_a_plan_says_what_a_start_does_to_the_byte(model, options, tmp_path):
    write_hf_model(model, tmp_path / "model", dtype="bf16")
    folder = str(tmp_path / "model")

    plan = plan_for(
        question_from(
            keyword_source({"model": folder}),
            Source(name="test", values={**options, "purpose": "offline"}, spellings={}),
        )
    )
    llm = LLM(folder, **options)

    resolved = llm.config_document()
    assert plan.weight_bytes == resolved["weight_bytes"]
    assert plan.activation_peak_bytes == resolved["activation_bytes"]
    assert plan.overhead_bytes == resolved["overhead_bytes"]
    assert plan.kv_pool_bytes == plan.kv_pool_bytes_low == plan.kv_pool_bytes_high == resolved["kv_pool_bytes"]
    assert (plan.num_blocks, plan.block_size) == (resolved["num_blocks"], resolved["block_size"])
    assert plan.kv_bytes_per_block == resolved["block_bytes"]
    if len(plan.groups) == 1:
        assert plan.kv_bytes_per_token * plan.block_size == plan.kv_bytes_per_block
    assert (plan.max_model_len, plan.pool_tokens) == (resolved["max_model_len"], llm.card.pool_tokens)
    assert plan.kv_allocator == options.get("kv_allocator", "paged")
    assert plan.fits
    if plan.kv_allocator == "paged":
        assert plan.max_concurrency == llm.card.max_concurrency
    else:
        (output,) = llm.generate(
            [{"prompt_token_ids": [5 + i % 400 for i in range(plan.max_model_len - 1)]}],
            SamplingParams(max_tokens=1, ignore_eos=True),
        )
        assert len(output.outputs[0].token_ids) == 1, "a run is as long as what is said to fit"
        assert plan.max_concurrency == plan.reserved_concurrency >= 1
    runner = llm.engine._runner
    if resolved["runner"] == "reference":
        assert plan.weight_bytes == sum(each.nbytes for each in runner._weights.values())
    else:
        assert plan.activation_peak_bytes == runner.activation_bytes
        assert plan.kv_pool_bytes + READ_AHEAD_BYTES == runner.pool_bytes
        opened = open_model(tmp_path / "model")
        with WeightSource(opened) as source:
            packed = pack_weights(source.read_all(), opened.program, weight_dtype=resolved["weight_dtype"])
        assert plan.weight_bytes == packed.resident_bytes


def test_parts_add_up_to_the_memory(tmp_path):
    write_hf_model(TinyModel(), tmp_path / "model")

    for options in ({"memory": "200MiB"}, {"memory": "10MiB"}, {"device": "epyc-9654"}):
        plan = plan_for(PlanQuestion(model=str(tmp_path / "model"), **options))
        parts = plan.weight_bytes + plan.activation_peak_bytes + plan.overhead_bytes + plan.kv_pool_bytes
        assert parts + plan.headroom_bytes == plan.memory_bytes
        assert plan.fits == (options != {"memory": "10MiB"})


def test_the_longest_that_fits_starts_and_is_served_and_one_more_is_refused(tmp_path):
    write_hf_model(TinyModel(), tmp_path / "model")
    folder, pool = str(tmp_path / "model"), {"kv_cache_memory": "300KiB", "runner": "native"}
    plan = plan_for(PlanQuestion(model=folder, purpose="offline", **pool))
    longest = plan.longest_fitting_len
    assert 16 <= longest < 2048, "the pool is what limits the length"

    llm = LLM(folder, max_model_len=longest, **pool)
    prompt = {"prompt_token_ids": [5 + i % 400 for i in range(longest - 1)]}
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1

    with pytest.raises(CapacityError):
        LLM(folder, max_model_len=longest + 1, **pool)
    refused = plan_for(PlanQuestion(model=folder, purpose="offline", max_model_len=longest + 1, **pool))
    assert not refused.fits
    assert refused.longest_fitting_len == longest
    with pytest.raises(CapacityError) as caught:
        refused.check()
    assert f"--max-model-len {longest}" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("memory_mib", [40, 51, 52, 60, 64, 100])
def test_every_change_that_is_advised_starts(tmp_path, memory_mib):
    """Budgets from hopeless to roomy, against a length that only the largest holds."""
    write_hf_model(TinyModel(num_layers=8, num_kv_heads=4), tmp_path / "model")
    folder = str(tmp_path / "model")
    asked = {"memory": f"{memory_mib}MiB", "max_model_len": 2048, "max_num_seqs": 4, "purpose": "offline"}
    plan = plan_for(PlanQuestion(model=folder, **asked))

    changes = [each for each in plan.advice if each.kind == "change"]
    if plan.fits:
        assert not changes
        return
    assert changes, "nothing is advised"
    for change in changes:
        options = {**asked, **change.options}
        del options["purpose"]
        llm = LLM(folder, **options)
        assert llm.card.max_model_len == int(options["max_model_len"])


def test_what_fits_is_monotone_in_the_length(tmp_path):
    write_hf_model(TinyModel(num_layers=8, num_kv_heads=4), tmp_path / "model")

    fits = [
        plan_for(PlanQuestion(model=str(tmp_path / "model"), memory="60MiB", max_model_len=length)).fits
        for length in (16, 64, 128, 256, 512, 1024, 1536, 2048)
    ]
    assert fits == sorted(fits, reverse=True)


def test_a_packaged_model_is_planned_alike_before_and_after_it_is_there(tmp_path):
    try:
        path = find_real_model()
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")
    opened = open_model(path)

    sizes = PACKAGED_SIZES["smollm2-135m"]
    kinds = {name: sizes.kind_of(name, entry.shape) for name, entry in opened.tensors.items()}
    assert kinds == {name: entry.kind for name, entry in opened.tensors.items()}
    asked = {"memory": "2GiB", "max_model_len": 8192}
    before = plan_for(PlanQuestion(model="smollm2-135m", **asked), environ={"OCTAVO_CACHE": str(tmp_path)})
    after = plan_for(PlanQuestion(model=str(path), **asked))
    for name in (
        "weight_bytes",
        "activation_peak_bytes",
        "overhead_bytes",
        "kv_pool_bytes",
        "num_blocks",
        "parameters",
    ):
        assert getattr(before, name) == getattr(after, name), name


MEASURE = """
import sys
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], runner="native", kv_prefault=True, memory=sys.argv[2], max_model_len=int(sys.argv[3]))
prompt = {"prompt_token_ids": [7 + i % 40000 for i in range(int(sys.argv[3]) - 1)]}
llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
status = open("/proc/self/status").read()
print(int(status.split("VmRSS:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_resident_memory_is_what_was_planned():
    try:
        model = find_real_model()
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")
    plan = plan_for(PlanQuestion(model=str(model), memory="500MiB", max_model_len=512, purpose="offline"))

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), "500MiB", "512"],
        env=dict(os.environ),
        capture_output=True,
        timeout=300,
        check=True,
    )

    promised = plan.weight_bytes + plan.activation_peak_bytes + plan.overhead_bytes + plan.kv_pool_bytes
    assert abs(int(done.stdout) - promised) <= 0.03 * promised


def test_a_form_reads_no_files_and_asks_no_network(tmp_path):
    write_hf_model(TinyModel(), tmp_path / "model")
    folder = str(tmp_path / "model")

    with pytest.raises(ModelNotFoundError):
        plan_document({"model": folder})
    with pytest.raises(ModelNotFoundError):
        plan_document({"model": "someone/unheard-of-7b"})
    with pytest.raises(InvalidParameterError):
        plan_document({"model": "llama-3-8b", "trace": "/etc/hostname"})
    served = plan_document({"model": folder, "memory": "1GiB", "max-model-len": ""}, local_models=(folder,))
    assert served["schema"] == "octavo.plan/1"
    assert plan_document({"model": "llama-3-70b", "device": "h100", "--devices": "4"})["num_devices"] == 4


def test_a_lone_configuration_is_enough(tmp_path):
    write_hf_model(TinyModel(), tmp_path / "model")
    whole = plan_for(PlanQuestion(model=str(tmp_path / "model"), memory="1GiB"))
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()

    for lone in (tmp_path / "model", tmp_path / "model" / "config.json"):
        plan = plan_for(PlanQuestion(model=str(lone), memory="1GiB"))
        assert plan.weight_bytes == whole.weight_bytes
        assert plan.num_blocks == whole.num_blocks


def test_catalogue_models_that_octavo_runs_have_a_spec_of_the_same_size():
    subject = find_subject("llama-3.2-1b", {})
    assert subject.spec is not None
    assert subject.shape.num_parameters == subject.spec.num_parameters


def test_a_gguf_file_of_a_model_that_octavo_does_not_run_is_planned_for_those_who_do(tmp_path):
    """StarCoder 2: 2 layers of 2 KV heads of 16 in 16 bits are 256 B a token; all matrices in f16."""
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "starcoder2")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_context_length(2048)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    matrices = {"token_embd": (500, 64)}
    vectors = {"output_norm": 64}
    for layer in range(2):
        shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        shapes |= {"ffn_up": (96, 64), "ffn_down": (64, 96)}
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        vectors |= {f"blk.{layer}.{name}": 64 for name in ("attn_norm", "ffn_norm")}
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float16))
        if name != "token_embd":
            writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))
    for name, width in vectors.items():
        writer.add_tensor(f"{name}.weight", np.zeros(width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()

    plan = plan_for(PlanQuestion(model=str(tmp_path / "tiny.gguf"), memory=8 * GIB))

    assert (plan.engine, plan.kv_bytes_per_token) == ("vllm", 256)
    assert "Octavo does not run Starcoder2ForCausalLM" in plan.engine_because
    stored = 2 * sum(rows * columns for rows, columns in matrices.values())
    stored += 4 * (sum(shape[0] for name, shape in matrices.items() if name != "token_embd") + 2 * 64 * len(vectors))
    assert find_subject(str(tmp_path / "tiny.gguf"), {}).stored_bytes == stored
    with pytest.raises(UnsupportedModelError, match="starcoder2"):
        plan_for(PlanQuestion(model=str(tmp_path), engine="octavo"))


def test_the_next_command_names_what_the_engine_can_load(tmp_path):
    folder = str(tmp_path / "model")
    write_hf_model(TinyModel(), tmp_path / "model")
    (tmp_path / "lone").mkdir()
    (tmp_path / "lone" / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())

    def command(model: str, **asked: object) -> str:
        return plan_for(PlanQuestion(model=model, **asked), environ={"OCTAVO_CACHE": str(tmp_path)}).next_command

    assert command(folder, engine="vllm", memory=8 * GIB).startswith(f"vllm serve {folder} ")
    assert f"--model-path {folder} " in command(folder, engine="sglang", device="l4")
    assert command(folder).startswith(f"octavo serve {folder}")
    # Without weights there is nothing to load, and an alias is known to Octavo alone.
    for model in (str(tmp_path / "lone"), str(tmp_path / "lone" / "config.json")):
        assert command(model) == command(model, device="l4") == ""
    assert command("smollm2-135m", device="l4") == ""
    assert command("smollm2-135m").startswith("octavo serve smollm2-135m")
