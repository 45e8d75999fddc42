"""Whatever a form holds, a plan is an answer that adds up, or one of our errors."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.option import Option
from octavo.errors import OctavoError
from octavo.llm.plan import plan_document
from octavo.models.catalogue import list_models
from octavo.planner.devices import list_devices
from octavo.planner.question import PLAN_OPTIONS

_BY_KIND = {
    "bytes": ("1B", "200MiB", "16GiB", "80GiB", "8000TiB", "24"),
    "ratio": ("0.01", "0.5", "0.9", "1", "1e-9"),
    "flag": ("1", "0"),
    "count": ("1", "2", "3", "16", "512", "4k", "32k", "2147483647", "auto", "0"),
    "integer": ("0", "-5", "x"),
    "numbers": ("0", "0,1", "99999"),
    "text": ("x", "auto", ""),
}
_BY_NAME = {
    "model": ("smollm2-135m", "llama-3", *list_models()),
    "device": ("h100", "x", *(device.id for device in list_devices())),
    "lengths": ("1:1", "1155:211", "500:100x3,8k:500", "2g:1", "100000000:3", "1:900000000", "a"),
    "itl": ("1us", "20ms", "5s", "1000min", "5"),
    "engine_version": ("0.19", "0.6.4", "0.2", "0.30", "v0.5.4", "99.99", "x"),
}


def values_of(option: Option) -> st.SearchStrategy[str]:
    if option.name in _BY_NAME:
        return st.sampled_from(_BY_NAME[option.name])
    return st.sampled_from(option.choices or _BY_KIND[option.kind])


MODEL, *OTHERS = (each for each in PLAN_OPTIONS if each.name != "trace")
# Few at a time, or nearly every form would contradict itself.
WORDS = st.sets(st.sampled_from([each.name for each in OTHERS]), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries(
        {MODEL.name: values_of(MODEL)} | {each.name: values_of(each) for each in OTHERS if each.name in names}
    )
)


@given(words=WORDS)
@settings(max_examples=120)
def test_a_form_gets_an_answer_that_adds_up_or_one_of_our_errors(words):
    try:
        document = plan_document(words)
    except OctavoError as error:
        assert error.message
        return
    parts = ("weight_bytes", "activation_peak_bytes", "overhead_bytes", "headroom_bytes", "kv_pool_bytes")
    assert sum(document[name] for name in parts) == document["memory_bytes"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    if document["fits"]:
        assert 1 <= document["max_model_len"] <= document["longest_fitting_len"]
        assert document["max_concurrency"] >= 1
        assert document["next_command"]
    else:
        assert document["advice"]
