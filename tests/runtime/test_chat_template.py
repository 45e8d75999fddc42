"""Chats as text and ids, against transformers' `apply_chat_template`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidParameterError, ModelFileError, OctavoError, UnsupportedModelError
from octavo.models.load import open_model
from octavo.runtime.chat_template import ChatTemplate
from octavo.runtime.folder_tokenizer import tokenizer_from_folder
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.tokenizer import ChatTemplateSource
from octavo.testing.real_model import find_real_model
from octavo.testing.tiny_models import make_tokenizer, make_tokenizer_config

ENDOFTEXT = 0

CHATML = make_tokenizer_config()["chat_template"]
WITH_BOS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role: ' ~ message.role) }}
    {%- endif %}
    {#- a comment #}
<|im_start|>{{ message['role'] | title }}
    {% if message.content is string %}
{{ message.content | trim }}
    {% else %}
        {% for part in message.content if part.type == 'text' %}
({{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ', ' }}) {{ part.text }}
        {% endfor %}
    {% endif %}
<|im_end|>
{%- endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""
WITH_TOOLS = """\
{%- set ns = namespace(count=0, names=[]) %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{% set ns.count = ns.count + 1 %}
{{ ns.count ~ '. ' ~ tool.function.name }}: {{ tool | tojson }} {{ tool.function | tojson(indent=2) }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages -%}
{%- if loop.index0 > 20 %}{% break %}{% endif %}
{%- generation %}{{ message.role }}: {{ message.content }}{%- endgeneration %}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.name is defined %} from {{ message.name }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %} no thinking{% endif %}
{{ eos_token }}
{% endfor -%}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') | upper }}
{{- dict(a=1, b=[2.5, none, true]) | tojson }} {{ 'x=%s' | format(7) }} {{ 7 // 2 }} {{ '-' * 5 }}
{%- macro twice(text) %}{{ text }}{{ text }}{% endmacro %}{{ twice('ab') }}"""

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <|im_end|> & 'you' — 日本 😀"}],
    "turns": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Why?\n\n\nBecause"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": " leading and trailing "},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "calls": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"city": "Åre", "n": 1}}}],
        },
        {"role": "tool", "content": '{"t": -3.5}', "name": "get"},
        {"role": "assistant", "content": "cold", "reasoning": "because"},
    ],
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "<Ask>", "parameters": {"type": "object", "é": []}}}
]


def write_folder(folder: Path, template: str | list[dict[str, str]], *, adds_bos: bool = False) -> Path:
    tokenizer = make_tokenizer(800)
    if adds_bos:
        bos = "<|endoftext|>"
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [ENDOFTEXT], "tokens": [bos]}},
        }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = make_tokenizer_config() | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def template_of(text: str, tmp_path: Path, **options: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer_from_folder(write_folder(tmp_path, text)), **options)


@pytest.mark.parametrize("adds_bos", [False, True], ids=["bare", "bos"])
@pytest.mark.parametrize("template", [CHATML, WITH_BOS, WITH_TOOLS], ids=["chatml", "bos", "tools"])
def test_ids_and_texts_equal_those_of_transformers(tmp_path, template, adds_bos):
    transformers = pytest.importorskip("transformers", reason="transformers is the yardstick of this test")
    folder = write_folder(tmp_path, template, adds_bos=adds_bos)
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = tokenizer_from_folder(folder)
    ours = ChatTemplate(tokenizer)

    for name, messages in CHATS.items():
        if name == "parts" and template is CHATML:
            continue
        if name == "calls" and template is WITH_BOS:  # a message without content fails in both
            continue
        for tools in (None, TOOLS):
            for prompt in (False, True):
                settings = {"tools": tools, "add_generation_prompt": prompt}
                text = reference.apply_chat_template(messages, tokenize=False, enable_thinking=False, **settings)
                ids = reference.apply_chat_template(messages, enable_thinking=False, return_dict=True, **settings)[
                    "input_ids"
                ]

                variables = {"enable_thinking": False}
                assert ours.render(messages, variables=variables, **settings) == text
                assert ours.encode(messages, variables=variables, **settings) == ids
                assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_of_a_tokenizer_that_adds_bos_has_one_bos(tmp_path):
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, WITH_BOS, adds_bos=True))
    chat = ChatTemplate(tokenizer)

    assert tokenizer.encode("x")[0] == ENDOFTEXT
    assert chat.encode(CHATS["one"]).count(ENDOFTEXT) == 1
    # The rendered chat, pasted as a plain prompt, is the same prompt.
    assert tokenizer.encode(chat.render(CHATS["one"])) == chat.encode(CHATS["one"])


def test_each_turn_starts_with_the_whole_last_one(tmp_path):
    """So that a second turn finds the first one's blocks: ids of a longer chat begin with those of the shorter."""
    chat = template_of(CHATML, tmp_path)
    turns = CHATS["turns"]

    shorter = chat.encode(turns[:2])
    longer = chat.encode(turns)

    assert longer[: len(shorter)] == shorter


def test_default_model_formats_chats_as_transformers_does():
    try:
        tokenizer = load_tokenizer(open_model(find_real_model()))
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")
    reference = pytest.importorskip("transformers.utils.chat_template_utils")

    for name in ("one", "turns"):
        expected, _ = reference.render_jinja_template(
            [CHATS[name]], chat_template=tokenizer.chat_template, add_generation_prompt=True, **tokenizer.special.roles
        )
        assert ChatTemplate(tokenizer).render(CHATS[name]) == expected[0]
    ids = ChatTemplate(tokenizer).encode(CHATS["one"])
    assert [ids[0], *ids[-4:]] == [1, 1, 520, 9531, 198]
    assert tokenizer.decode(ids[-4:], skip_special_tokens=False) == "<|im_start|>assistant\n"
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.decode(ids)


def test_tools_choose_the_template_made_for_them(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].x }}"}]
    chat = ChatTemplate(tokenizer_from_folder(write_folder(tmp_path, named)))

    assert chat.render(CHATS["one"]) == "plain"
    assert chat.render(CHATS["one"], tools=[{"x": "tooled"}]) == "tooled"


def test_date_comes_from_the_given_clock(tmp_path):
    now = datetime(2024, 7, 26, 12, tzinfo=UTC)
    chat = template_of("{{ strftime_now('%d %b %Y') }}", tmp_path, now=lambda: now)

    assert chat.render(CHATS["one"]) == "26 Jul 2024"


def test_a_template_of_the_caller_replaces_the_models(tmp_path):
    mine = ChatTemplateSource(text="{{ messages[0].content }}!", where="--chat-template")

    assert template_of("theirs", tmp_path, override=mine).render([{"role": "user", "content": "a"}]) == "a!"


def test_callers_objects_are_copied_and_plain(tmp_path):
    class Role(StrEnum):
        USER = "user"

    message = {"role": Role.USER, "content": ({"type": "text", "text": "a"},), "n": 1.5}
    chat = template_of("{{ messages | tojson }}{{ messages[0].role.name is defined }}", tmp_path)

    expected = '[{"role": "user", "content": [{"type": "text", "text": "a"}], "n": 1.5}]False'
    assert chat.render([message]) == expected
    assert message["role"] is Role.USER


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "extra": {"a": [object()]}}], "messages[0].extra.a[0]"),
    ],
    ids=["none", "text", "one message", "texts", "no role", "odd role", "odd content", "odd extra"],
)
def test_messages_of_a_wrong_shape_are_refused_by_place(tmp_path, messages, param):
    with pytest.raises(InvalidParameterError) as caught:
        template_of(CHATML, tmp_path).render(messages)

    assert caught.value.param == param


@pytest.mark.parametrize("tools", ["x", {"a": 1}, ["x"]], ids=str)
def test_tools_of_a_wrong_shape_are_refused(tmp_path, tools):
    with pytest.raises(InvalidParameterError, match=r"^tools"):
        template_of(CHATML, tmp_path).render(CHATS["one"], tools=tools)


def test_messages_nested_without_end_are_refused(tmp_path):
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(InvalidParameterError, match="nested more than 100 deep"):
        template_of(CHATML, tmp_path).render([{"role": "user", "content": endless}])


def test_half_a_surrogate_pair_in_a_message_is_the_messages_fault(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"messages: half a surrogate pair \(U\+D800\)"):
        template_of(CHATML, tmp_path).encode([{"role": "user", "content": "\ud800"}])


def test_a_refusal_of_the_template_reaches_the_caller_in_its_own_words(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"messages: .* refuses this chat: unknown role: bard") as caught:
        template_of(WITH_BOS, tmp_path).render([{"role": "bard", "content": "x"}])

    assert "tokenizer_config.json: chat_template" in caught.value.because


@pytest.mark.parametrize(
    "text", ["{{ messages[0].nothing.more }}", "{{ 1 + 'a' }}", "{{ messages | tojson(5, 6, 7, 8, 9) }}", "{{ 1 / 0 }}"]
)
def test_a_chat_that_a_template_fails_on_is_the_callers_to_change(tmp_path, text):
    with pytest.raises(InvalidParameterError, match=r"messages: .* cannot format this chat: ."):
        template_of(text, tmp_path).render(CHATS["one"])


@pytest.mark.parametrize("text", ["{% for x in messages %}", "a\n{{ }}", "{% frob %}", "{{ 1 | nofilter }}"])
def test_a_template_that_is_none_is_a_broken_file(tmp_path, text):
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: chat_template is no valid template: line \d"):
        template_of(text, tmp_path).render(CHATS["one"])


def test_a_model_without_chat_template_is_refused_for_chats(tmp_path):
    folder = write_folder(tmp_path, CHATML)
    config = make_tokenizer_config()
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(UnsupportedModelError, match="the model has no chat template"):
        ChatTemplate(tokenizer_from_folder(folder)).render(CHATS["one"])
