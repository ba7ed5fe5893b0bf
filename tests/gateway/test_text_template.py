"""Templates render as transformers renders them, and a bad one harms nobody."""

from __future__ import annotations

import json

import msgspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gateway.openai import FunctionCall, Message, ToolCall
from gateway.text import Text, TextInvalid
from gateway.text.messages import as_dict
from gateway.text.template import ChatTemplate, TemplateFailure, TemplateInvalid
from tests.gateway.texts import CHATML, byte_level, model_directory

LLAMA_STYLE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim +
        '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_STYLE = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
QWEN_STYLE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- message.content }}{% endgeneration %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
        {{- tool_call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA_STYLE, "mistral": MISTRAL_STYLE, "qwen": QWEN_STYLE}
TOOL = {"type": "function", "function": {"name": "météo", "parameters": {"a": "<b> & 'c'"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ärden", "days": 2}}}
USER = {"role": "user", "content": " What's <b>up</b> & où? "}
CONVERSATIONS = [
    [USER],
    [USER, {"role": "assistant", "content": "Hm."}, USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "7 °C"}],
]


CHATML_TEMPLATE = ChatTemplate(CHATML, {})


def rendered(template: str, messages: list[dict], tools: list[dict] | None = None, **switches: object) -> str:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, tools, switches)


@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, messages, tools, switches):
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    try:
        expected = theirs.apply_chat_template(
            messages,
            tools,
            chat_template=TEMPLATES[name],
            add_generation_prompt=True,
            tokenize=False,
            **switches,
        )
    except Exception:
        with pytest.raises(TemplateFailure):
            rendered(TEMPLATES[name], messages, tools, **switches)
    else:
        assert rendered(TEMPLATES[name], messages, tools, **switches) == expected


def test_arguments_are_an_object_and_parts_are_one_text():
    call = {"function": {"name": "f", "arguments": '{"a": [1]}'}}
    message = Message("assistant", content=None, tool_calls=[_call(call)])
    entry = as_dict(message, CHATML_TEMPLATE)
    assert entry["content"] == ""
    assert entry["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    for odd in ("not JSON", "[1]", "[" * 100_000):
        call["function"]["arguments"] = odd
        odd_message = Message("assistant", tool_calls=[_call(call)])
        assert as_dict(odd_message, CHATML_TEMPLATE)["tool_calls"][0]["function"]["arguments"] == odd


def _call(call: dict) -> object:
    return msgspec.convert(call, ToolCall)


def test_reasoning_has_the_name_by_which_a_template_knows_it():
    named = ChatTemplate("{% for m in messages %}{% if 'thinking' in m %}<{{ m.thinking }}>{% endif %}{% endfor %}", {})
    switched = ChatTemplate("{{ messages[0].reasoning_content }}{% if thinking %}<think>{% endif %}", {})
    call = ToolCall(FunctionCall("get_time", "{}"), "1")
    said = [
        Message("assistant", None, reasoning_content="I look.", tool_calls=[call]),
        Message("assistant", "It is noon.", reasoning_content="Noon."),
        Message("assistant", "A text beside a call.", reasoning_content="Both.", tool_calls=[call]),
    ]
    assert named.render([as_dict(message, named) for message in said], None, {}) == "<I look.><Noon.>"
    assert "thinking" not in as_dict(said[0], switched)


def test_reasoning_may_come_back_by_vllms_name():
    for said in (
        {"reasoning": "Noon."},
        {"reasoning_content": "Noon."},
        {"reasoning": "", "reasoning_content": "Noon."},
    ):
        assert as_dict(Message("assistant", "12", **said), CHATML_TEMPLATE)["reasoning_content"] == "Noon."


def test_a_developer_is_a_system_to_templates_that_know_none():
    message = Message("developer", "Be brief.")
    assert as_dict(message, CHATML_TEMPLATE)["role"] == "system"
    assert as_dict(message, ChatTemplate("{% if m.role == 'developer' %}{% endif %}", {}))["role"] == "developer"


def test_an_older_function_and_its_call_are_a_tool_and_a_call():
    called = Message("assistant", function_call=FunctionCall("f", "{}"))
    assert as_dict(called, CHATML_TEMPLATE)["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert as_dict(Message("function", "7", name="f"), CHATML_TEMPLATE) == {
        "role": "tool",
        "content": "7",
        "name": "f",
    }


def test_a_template_that_wants_short_ids_gets_them_the_same_in_call_and_result():
    mistral = ChatTemplate("{% if tool_call.id|length != 9 %}{{ raise_exception('9') }}{% endif %}", {})
    assert mistral.id_of("abcDEF123") == "abcDEF123"
    short = mistral.id_of("call_" + "x" * 24)
    assert (len(short), short.isalnum()) == (9, True)
    assert short == mistral.id_of("call_" + "x" * 24) != mistral.id_of("call_" + "y" * 24)
    assert CHATML_TEMPLATE.id_of("call_1") == "call_1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ 9 ** 9999999 }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ 'x' * 10000 }}{% endfor %}{% endfor %}",
        "{% for a in range(10000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
        "{{ strftime_now(5) }}",
    ],
)
def test_what_goes_wrong_in_a_template_is_a_failure_of_the_request(template):
    with pytest.raises(TemplateFailure):
        rendered(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% for a in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    ],
    ids=["macros", "loops", "a loop in itself"],
)
def test_work_without_an_end_is_given_up(monkeypatch, template):
    monkeypatch.setattr("gateway.text.template.MAX_RENDER_S", 0.1)
    with pytest.raises(TemplateFailure, match="it takes too long"):
        rendered(template, [USER])


def test_deep_values_do_not_break_it():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateFailure):
        rendered("{{ tools | tojson }}", [USER], deep)


def test_a_template_that_is_no_jinja_is_refused_when_the_model_is_loaded(tmp_path):
    with pytest.raises(TemplateInvalid, match="line 2"):
        ChatTemplate("x\n{% if %}", {})
    with pytest.raises(TextInvalid, match="chat template is not valid: line 1"):
        Text.load(model_directory(tmp_path, template="{{ "))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
        "{% if messages %}" * 150 + "{% endif %}" * 150,
        "{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}",
        "{{ messages" + "|first" * 3000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{% macro m(a, a) %}{% endmacro %}",
    ],
    ids=["loops", "conditions", "brackets", "filters", "digits", "two of one name"],
)
def test_a_template_that_is_too_much_for_python_is_refused_likewise(tmp_path, template):
    with pytest.raises(TextInvalid, match="the chat template cannot be compiled: ") as refusal:
        Text.load(model_directory(tmp_path, template=template))
    assert str(refusal.value).isprintable()


def test_a_tool_template_is_used_for_requests_with_tools(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    text = Text.load(model_directory(tmp_path, template=None, chat_template=templates))
    assert {name: template.render([USER], None, {}) for name, template in text._templates.items()} == {
        "default": "plain",
        "tool_use": "with tools",
    }


def test_a_template_of_its_own_file_wins(tmp_path):
    directory = model_directory(tmp_path, template="from the file", chat_template="from the configuration")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    text = Text.load(directory)
    assert text._templates["default"].render([USER], None, {}) == "from the file"
    assert text._templates["tool_use"].render([USER], None, {}) == "with tools"


def test_a_file_of_its_own_takes_the_place_of_a_whole_list_as_in_transformers(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    directory = model_directory(tmp_path, template="from the file", eos_token="</s>", chat_template=templates)
    text = Text.load(directory)
    assert {name: template.render([USER], None, {}) for name, template in text._templates.items()} == {
        "default": "from the file"
    }
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template([USER], tools=tools, tokenize=False)
    assert theirs == "from the file"


def test_special_tokens_may_be_names_or_descriptions(tmp_path):
    directory = model_directory(tmp_path, template="{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}")
    assert Text.load(directory)._templates["default"].render([USER], None, {}) == "<s><|im_end|>False"
    assert "pad_token" not in json.loads((directory / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(("others", "said"), [({}, "<s>|</s>"), ({"added_tokens_decoder": {}}, "|<|im_end|>")])
def test_older_models_name_special_tokens_in_a_file_of_their_own_as_in_transformers(tmp_path, others, said):
    config = {"bos_token": None, "eos_token": "<|im_end|>", **others}
    directory = model_directory(tmp_path, template="{{ bos_token }}|{{ eos_token }}", **config)
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "additional_special_tokens": ["<|im_end|>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(names))
    assert Text.load(directory)._templates["default"].render([USER], None, {}) == said
    assert AutoTokenizer.from_pretrained(directory).apply_chat_template([USER], tokenize=False) == said
