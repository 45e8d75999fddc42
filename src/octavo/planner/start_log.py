"""StartLog: what a start-up log of another engine says about memory, for the releases of vLLM, SGLang and llama.cpp.

Every engine prints binary units, whatever it calls them (`GB` of vLLM before 0.7 and of SGLang are GiB). Devices of a
group print the same lines; the fullest device counts: most weights, least room for the KV pool.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from octavo.errors import InvalidParameterError
from octavo.planner.log_fields import Fields, count_after, first_match, size_after, sizes_after
from octavo.units import GIB, MIB

LoggedEngine = Literal["vllm", "sglang", "llama.cpp"]

# Digits are bounded: nothing has so many, and longer numbers overflow what they are turned into.
_PLAIN = r"\d{1,15}(?:\.\d{1,15})?"
_NUMBER = rf"(-?{_PLAIN})"
_COUNT = r"(\d[\d,]{0,24})"
_GIB = r"\s*(?:GiB|GB)"
_MARKS: tuple[tuple[LoggedEngine, str], ...] = (
    (
        "llama.cpp",
        r"llama_(?:kv_cache|context|new_context_with_model|init_from_model|model_load)\w*:|llm_load_tensors:",
    ),
    ("sglang", r"KV Cache is allocated|max_total_num_tokens=|Load weight end|ServerArgs\("),
    (
        "vllm",
        r"vLLM|[Mm]odel weights t(?:ook|ake)|Model loading|# \w+ blocks:|KV cache (?:memory|size):|peak activation",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLog:
    """What was read; `None` where the log does not say.

    Args:
        version: The engine's release as it prints it.
        visible_bytes: The device's memory as the engine sees it; what of it is free before the weights, for SGLang.
        activation_bytes: Peak of a step beside the weights, as measured.
        overhead_bytes: Memory outside the engine's own allocator.
        graph_bytes: What CUDA graphs took, or were estimated to take.
        kv_pool_bytes: Room for the KV pool on the fullest device; keys and values together.
        num_blocks, pool_tokens: As printed; what tokens mean changed between releases of vLLM.
        max_concurrency: Requests of `max_model_len` that the engine says it holds.
    """

    engine: LoggedEngine
    version: str | None = None
    model: str | None = None
    visible_bytes: int | None = None
    utilization: float | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    overhead_bytes: int | None = None
    graph_bytes: int | None = None
    kv_pool_bytes: int | None = None
    num_blocks: int | None = None
    pool_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    is_eager: bool = False


def read_start_log(text: str, *, param: str = "calibrate") -> StartLog:
    """Read a start-up log; other lines in it do not matter.

    Raises:
        InvalidParameterError: no line of a known engine about memory is in it.
    """
    for engine, marks in _MARKS:
        if re.search(marks, text):
            log = _READERS[engine](text)
            if log.weight_bytes is not None or log.kv_pool_bytes is not None or log.num_blocks is not None:
                return log
    raise InvalidParameterError(
        "no line about memory was found in the log",
        param=param,
        because="it looks for what vLLM, SGLang and llama.cpp print when they start, such as `Available KV cache"
        " memory: 61.66 GiB`, `KV Cache is allocated. #tokens: 46611` or `llama_kv_cache: size = 1088.00 MiB`",
        hints=("give the whole output of a start, from the first line until the server answers",),
    )


def _read_vllm(text: str) -> StartLog:
    fields = Fields(text)
    weights = _gib(text, r"(?:Loading model weights|Model loading) took\s+", r"model weights take\s*")
    if weights is None:
        weights = _gib(text, r"weights memory:\s*")
    if weights is None:
        weights = _gib(text, r"Actual usage is\s+", after=r"\s+for weight\b")
    activation = _gib(text, r"activation\s+peak memory takes\s*", r"torch peak memory increase:\s*")
    if activation is None:
        activation = _gib(text, r"[, ]", after=r"\s+for peak activation")
    whole_peak = _gib(text, r"peak_torch_memory=")
    if activation is None and whole_peak is not None and weights is not None:
        activation = whole_peak - weights  # 0.6.4 printed it so
    overhead = _gib(text, r"non_torch_memory(?:\s+takes\s*|=)", r"non-torch forward increase memory:\s*")
    if overhead is None:
        overhead = _gib(text, r"[, ]", after=r"\s+for non-torch memory")
    consumed = _gib(text, r"[, ]", after=r"\s+for consumed memory")
    # What was estimated counts where both are printed: it is what the pool was made smaller by.
    graphs = _gib(text, r"Estimated CUDA graph memory:\s*", r"Graph capturing finished in [\d.]+ secs?, took ")
    if graphs is None:
        graphs = _gib(text, r"\s", after=r"\s+for CUDAGraph memory")
    if consumed is not None:
        # Later releases print weights and overhead as one, and count the graphs to the peak.
        overhead = consumed - weights if overhead is None and weights is not None else overhead
        activation = activation - graphs if activation is not None and graphs is not None else activation
    concurrency = first_match(text, rf"Maximum concurrency for {_COUNT}\s+tokens per request: ({_PLAIN})x")
    return StartLog(
        engine="vllm",
        version=_vllm_version(text),
        model=fields.text("model"),
        visible_bytes=_vllm_visible(text) or None,
        utilization=_vllm_utilization(text, fields),
        weight_bytes=weights,
        activation_bytes=activation,
        overhead_bytes=overhead,
        graph_bytes=graphs,
        kv_pool_bytes=_vllm_pool(text),
        num_blocks=count_after(text, rf"# (?!CPU)\w+ blocks:\s*{_COUNT}"),
        pool_tokens=count_after(text, rf"GPU KV cache size:\s*{_COUNT}\s+tokens"),
        max_concurrency=None if concurrency is None else float(concurrency[1]),
        max_model_len=fields.count("max_model_len", "max_seq_len")
        or (None if concurrency is None else int(concurrency[0].replace(",", "")) or None),
        max_num_seqs=fields.count("max_num_seqs"),
        max_num_batched_tokens=fields.count("max_num_batched_tokens"),
        block_size=fields.count("block_size"),
        tensor_parallel_size=fields.count("tensor_parallel_size"),
        pipeline_parallel_size=fields.count("pipeline_parallel_size"),
        is_eager=fields.is_true("enforce_eager"),
    )


def _gib(text: str, *before: str, after: str = "") -> int | None:
    """Return the size after the first of the patterns that is found; of several devices, the largest."""
    for each in before:
        found = size_after(text, f"{each}{_NUMBER}{_GIB}{after}", unit=GIB)
        if found is not None:
            return found
    return None


def _vllm_pool(text: str) -> int | None:
    """Return the room for the pool on the device that has the least."""
    sized = r"(?:reserved for KV\s+Cache is\s*|Available KV cache memory:\s*|kv_cache_size=)"
    for before in (sized, r"kv cache memory in use is\s+"):
        pools = sizes_after(text, before + _NUMBER + _GIB, unit=GIB)
        if pools:
            return min(pools)
    return count_after(text, r"kv cache memory in use is (\d{1,18}) bytes")


def _vllm_version(text: str) -> str | None:
    found = first_match(
        text,
        r"(?:vLLM (?:API server )?version|LLM engine \(|█\s+version)\s*v?(\d+\.\d+[\w.+-]*)",
    )
    return None if found is None else found[0].rstrip(".")


def _vllm_utilization(text: str, fields: Fields) -> float | None:
    stated = first_match(text, rf"Desired GPU memory\s+utilization is \(({_PLAIN}),")
    return fields.number("gpu_memory_utilization") if stated is None else float(stated[0])


def _vllm_visible(text: str) -> int | None:
    stated = _gib(text, r"total_gpu_memory\s*[(=]", r"Free memory on device [^(\n]*\([\d.]+/")
    if stated is not None:
        return stated
    # From 0.10 on only a debugging line tells: what was asked of it, and what share that is.
    asked = first_match(text, rf"Requested memory:\s*({_PLAIN}) \(util\),\s*({_PLAIN})\s*GiB")
    return None if asked is None or not float(asked[0]) else int(float(asked[1]) * GIB / float(asked[0]))


def _read_sglang(text: str) -> StartLog:
    fields = Fields(text)
    keys_values = first_match(
        text, rf"KV Cache is allocated\.[^\n]*?#tokens: {_COUNT}, K size: ({_PLAIN}) GB, V size: ({_PLAIN}) GB"
    )
    joint = first_match(text, rf"KV Cache is allocated\.[^\n]*?#tokens: {_COUNT}, (?:KV|Cache) size: ({_PLAIN}) GB")
    pool_bytes = None
    if keys_values is not None:
        pool_bytes = int((float(keys_values[1]) + float(keys_values[2])) * GIB)
    elif joint is not None:
        pool_bytes = int(float(joint[1]) * GIB)
    else:
        # Pools of windowed models are printed as one; a start that is refused prints only what would be left.
        pool_bytes = _gib(text, r"KVPool mem usage: ", r"Memory profiling: [^\n]*rest_memory=")
    allocated = keys_values or joint
    version = first_match(text, r"(?i)sglang(?:_version| version|==)[=: ]*v?(\d+\.\d+[\w.]*)")
    return StartLog(
        engine="sglang",
        version=None if version is None else version[0],
        model=fields.text("model_path"),
        visible_bytes=size_after(text, r"Load weight begin\. avail mem=" + _NUMBER + _GIB, unit=GIB),
        utilization=fields.number("mem_fraction_static"),
        # A draft model, which is smaller, is loaded after the model itself.
        weight_bytes=size_after(text, r"Load weight end\.[^\n]*?mem usage=" + _NUMBER + _GIB, unit=GIB),
        graph_bytes=size_after(text, r"(?i)capture [\w ]*cuda graph end\.[^\n]*?mem usage=" + _NUMBER + _GIB, unit=GIB),
        kv_pool_bytes=pool_bytes,
        pool_tokens=count_after(text, r"max_total_num_tokens=(\d{1,18})")
        or (None if allocated is None else int(allocated[0].replace(",", ""))),
        max_model_len=fields.count("context_len", "context_length"),
        max_num_seqs=fields.count("max_running_requests"),
        max_num_batched_tokens=fields.count("chunked_prefill_size"),
        block_size=fields.count("page_size"),
        tensor_parallel_size=fields.count("tp_size"),
        pipeline_parallel_size=fields.count("pp_size"),
        is_eager=fields.is_true("disable_cuda_graph"),
    )


def _read_llama_cpp(text: str) -> StartLog:
    # A dry run may come first, to see what fits; the last load is the real one.
    _, _, real = text.rpartition("loading model tensors")
    pools = sizes_after(real, r"llama_kv_cache\w*: +size =\s*" + _NUMBER + r" MiB", unit=MIB)
    pools = pools or sizes_after(real, r"KV self size\s*=\s*" + _NUMBER + r" MiB", unit=MIB)
    build = first_match(text, r"\bbuild(?::| =) *(\d+)")
    return StartLog(
        engine="llama.cpp",
        version=None if build is None else f"b{build[0]}",
        weight_bytes=_buffer_bytes(real, r"(?:model )?buffer size", before=r"load_tensors:"),
        activation_bytes=_buffer_bytes(real, r"compute buffer size", before=r"llama_\w+:"),
        kv_pool_bytes=sum(pools) if pools else None,
        pool_tokens=count_after(real, r"n_ctx\s*= (\d{1,18})"),
        max_model_len=count_after(real, r"n_ctx_(?:per_)?seq\s*= (\d{1,18})")
        or count_after(real, r"n_ctx\s*= (\d{1,18})"),
        max_num_seqs=count_after(real, r"n_seq_max\s*= (\d{1,18})"),
        max_num_batched_tokens=count_after(real, r"n_ubatch\s*= (\d{1,18})"),
    )


def _buffer_bytes(text: str, what: str, *, before: str) -> int | None:
    """Sum the buffers of all devices; those of the host only where there is no device."""
    found = re.findall(rf"{before} +([\w-]+) +{what} *= *({_PLAIN}) MiB", text)
    sizes = [(name, float(size)) for name, size in found]
    on_devices = [size for name, size in sizes if not re.match(r"CPU|.*_Host", name)]
    chosen = on_devices if sum(on_devices) > 0 else [size for _, size in sizes]
    return int(sum(chosen) * MIB) if chosen else None


_READERS = {"vllm": _read_vllm, "sglang": _read_sglang, "llama.cpp": _read_llama_cpp}
