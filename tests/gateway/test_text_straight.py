"""A template as a Python function says what Jinja says, whatever the template and the conversation."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import demo
from gateway.text.straight import straight
from gateway.text.template import ChatTemplate, TemplateFailure, _environment
from tests.gateway.test_text_template import LLAMA_STYLE, MISTRAL_STYLE
from tests.gateway.texts import CHATML

DEMO = (demo.MODEL_DIR / "chat_template.jinja").read_text()
KNOWN = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = ("a", "b", "m")

words = st.sampled_from(["", "a", " b ", "<|im_end|>", "{{ a }}", "naïve 🙂"])
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": words, "arguments": st.one_of(words, st.just({"x": 1}))})},
    optional={"id": words},
)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": st.one_of(words, st.none()), "tool_calls": st.lists(calls, max_size=2), "items": words},
)
conversations = st.fixed_dictionaries(
    {
        "messages": st.lists(turns, max_size=4),
        "tools": st.one_of(st.none(), st.lists(st.just({"type": "function"}), max_size=2)),
        "add_generation_prompt": st.booleans(),
    },
    optional={"a": words, "b": st.lists(words, max_size=2), "m": st.none()},
)


OWNED = [*(f"m.{key}" for key in ("role", "content", "items", "nothing")), "m['content']", "m['items']", "m[0]"]
PLAIN = [*NAMES, *OWNED, "'x'", "1", "none", "messages[0].role", "messages[1:]", "bos_token"]
OF_LOOPS = [
    f"loop.{key}" for key in ("first", "last", "index", "index0", "length", "cycle", "previtem.role", "nextitem")
]
BETWEEN = ["+", "-", "%", "~", "==", "!=", "<", "in", "and", "or"]
FILTERS = ["trim", "length", "tojson", "default('d')", "list", "upper"]
TESTS = ["defined", "none", "string", "mapping", "not defined", "equalto('a')"]


def a_value(rng: random.Random, num_loops: int, depth: int = 0) -> str:
    if depth == 3 or rng.random() < 0.5:
        return rng.choice(PLAIN + OF_LOOPS if num_loops else PLAIN)
    one, two, three = (a_value(rng, num_loops, depth + 1) for _ in range(3))
    return rng.choice(
        [
            f"({one} {rng.choice(BETWEEN)} {two})",
            f"(not {one})",
            f"({one} | {rng.choice(FILTERS)})",
            f"({one} is {rng.choice(TESTS)})",
            f"({one} if {two} else {three})",
        ]
    )


def a_template(rng: random.Random, num_loops: int = 0, depth: int = 0) -> str:
    """Statements that set, ask and forget the same few names at all depths."""
    kinds = ["say", "text", "set", "set", *(["if", "if", "for"] if depth < 3 else []), *(["stop"] if num_loops else [])]
    parts = []
    for kind in rng.choices(kinds, k=rng.randint(1, 4)):
        value = a_value(rng, num_loops)
        match kind:
            case "say":
                parts.append(f"[{{{{ {value} }}}}]")
            case "text":
                parts.append("text\n")
            case "set":
                parts.append(f"{{% set {rng.choice(NAMES)} = {value} %}}")
            case "if":
                body, other = (a_template(rng, num_loops, depth + 1) for _ in range(2))
                between = rng.choice(["{% else %}", f"{{% elif {a_value(rng, num_loops)} %}}"])
                parts.append(f"{{% if {value} %}}{body}{between}{other}{{% endif %}}")
            case "for":
                over = rng.choice(["messages", "m.tool_calls", "m.tool_calls or []", "b", value])
                body = a_template(rng, num_loops + 1, depth + 1)
                parts.append(f"{{% for {rng.choice(NAMES)} in {over} %}}{body}{{% endfor %}}")
            case "stop":
                parts.append(f"{{% if {value} %}}{{% {rng.choice(['break', 'continue'])} %}}{{% endif %}}")
    return "".join(parts)


def by_jinja(source: str, conversation: dict[str, Any]) -> str | None:
    """None where it fails."""
    try:
        return _environment.from_string(source, globals=dict(KNOWN)).render(conversation)
    except Exception:
        return None


def by_python(source: str, conversation: dict[str, Any]) -> tuple[str | None, bool]:
    """The text, None where Jinja is asked; and whether it always is."""
    known = {**_environment.globals, **KNOWN}
    function = straight(_environment.parse(source), _environment, known)
    if function is None:
        return None, True
    try:
        return function(conversation), False
    except Exception:
        return None, False


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32).map(lambda seed: a_template(random.Random(seed))), conversations)
@example("{% if a %}{{ a }}{% set a = 'x' %}{% endif %}{{ a }}", {"messages": [], "tools": None})
@example("{% for m in messages %}{{ a }}{% endfor %}{% set a = 1 %}", {"messages": [{}], "tools": None, "a": "w"})
@example("{% set a = 1 %}{% for m in messages %}{% set a = 2 %}{% endfor %}{{ a }}", {"messages": [{}], "tools": None})
def test_any_template_says_the_same(source: str, conversation: dict[str, Any]) -> None:
    text, _ = by_python(source, conversation)
    if text is not None:
        assert text == by_jinja(source, conversation), source


@pytest.mark.parametrize(
    "source", [DEMO, CHATML, LLAMA_STYLE, MISTRAL_STYLE], ids=["demo", "chatml", "llama", "mistral"]
)
@settings(max_examples=30, deadline=None)
@given(conversations)
def test_templates_in_use_say_the_same(source: str, conversation: dict[str, Any]) -> None:
    template, expected = ChatTemplate(source, KNOWN), by_jinja(source, conversation)
    try:
        said = template.render(conversation["messages"], conversation["tools"], conversation)
    except TemplateFailure:
        said = None
    assert said == expected
    text, is_jinjas = by_python(source, conversation)
    assert not is_jinjas
    assert text in (None, by_jinja(source, conversation))


@pytest.mark.parametrize(
    "source", [DEMO, CHATML, LLAMA_STYLE, MISTRAL_STYLE], ids=["demo", "chatml", "llama", "mistral"]
)
def test_an_ordinary_conversation_needs_no_jinja(source: str) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert by_python(source, {"messages": turns, "tools": None, "add_generation_prompt": True})[0]


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x=1) %}{{ messages }}",
        "{% macro f() %}{% endmacro %}{{ f() }}",
        "{% for a in messages %}{% for b in messages %}{{ b }}{% endfor %}{% endfor %}",
        "{% for a, b in messages %}{% endfor %}",
        "{{ 'a' * 3 }}",
        "{{ strftime_now('%Y') }}",
        "{% generation %}{% endgeneration %}",
        "{% for m in messages recursive %}{% endfor %}",
    ],
)
def test_what_is_more_than_putting_together_is_left_to_jinja(source: str) -> None:
    assert straight(_environment.parse(source), _environment, {}) is None


def test_what_only_some_conversations_come_to_is_left_to_jinja_for_those() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no') }}{% endif %}{{ m.role }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.render([{"role": "user"}], None, {}) == "user"
    with pytest.raises(TemplateFailure, match="refused the messages: no"):
        template.render([{"role": "x"}], None, {})


def test_names_and_keys_are_never_code() -> None:
    key = "'] or __import__('os').abort() or m['"
    source = f"{{% for m in messages %}}{{{{ m[{json.dumps(key)}] }}}}{{% endfor %}}"
    assert by_python(source, {"messages": [{key: "said"}]}) == ("said", False)
