"""The start card is true: with every block touched, resident memory is what it said (within 3 %)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import OctavoError
from octavo.testing.real_model import find_real_model

MEASURE = """
import sys
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], runner="native", kv_prefault=True, kv_cache_memory=sys.argv[2])
prompts = [{"prompt_token_ids": [(7 * i + j) % 40000 + 5 for j in range(600)]} for i in range(4)]
llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
status = open("/proc/self/status").read()
print(int(status.split("VmRSS:")[1].split()[0]) * 1024, llm.card.resident_limit_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_resident_memory_is_what_the_card_says_once_every_block_is_touched() -> None:
    try:
        model = find_real_model()
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), "400MiB"],
        env=dict(os.environ),
        capture_output=True,
        timeout=300,
        check=True,
    )

    resident_bytes, promised_bytes = map(int, done.stdout.split())
    assert abs(resident_bytes - promised_bytes) <= 0.03 * promised_bytes
