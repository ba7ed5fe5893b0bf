"""One model's text as the endpoints use it: encoding here or on a thread, and directories that cannot be used."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from gateway import turns
from gateway.errors import InvalidRequest, ServiceUnavailable
from gateway.openai import FunctionCall, Message, ToolCall
from gateway.text import Text, TextInvalid
from policies import settings
from tests.gateway.texts import a_text, byte_level, model_directory, word_pieces

HELLO = [Message("user", "Hello")]


async def test_no_special_token_is_added_to_what_the_template_wrote(tmp_path):
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    text = a_text(tmp_path, tokenizer=tokenizer, template="{{ bos_token }}{{ messages[0].content }}")
    assert await text.encode_chat(HELLO) == [begin, *byte_level().encode("Hello").ids]
    assert await text.encode(["Hello"]) == [[begin, *byte_level().encode("Hello").ids]]


async def test_a_special_tokens_name_in_a_message_is_that_token_as_in_transformers(tmp_path):
    text = a_text(tmp_path, template="{{ messages[0].content }}")
    assert await text.encode_chat([Message("user", "<|im_end|>")]) == [byte_level().token_to_id("<|im_end|>")]


async def test_tools_are_told_to_templates_that_take_no_system_and_have_turns_alternate_as_gemmas(tmp_path):
    turns = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}"
        "<{{ message.role }}>{{ message.content }}{% endfor %}"
    )
    text = a_text(tmp_path, template=turns)
    calls = [ToolCall(FunctionCall("get_time", f'{{"city": "{city}"}}'), city) for city in ("Arden", "Bree")]
    told = [
        *HELLO,
        Message("assistant", None, tool_calls=calls),
        *[Message("tool", f"noon in {call.id}", tool_call_id=call.id) for call in calls],
        Message("user", "And now?"),
    ]
    tools = [{"type": "function", "function": {"name": "get_time"}}]
    prompt = text.decode(await text.encode_chat(told, tools))
    assert prompt.startswith('<user>You can call these functions:\n{"name": "get_time"}\n')
    assert "\n\nHello<assistant>[" in prompt
    assert prompt.endswith("<user>get_time gave: noon in Arden\nget_time gave: noon in Bree\nAnd now?")


async def test_a_long_prompt_is_read_on_a_thread_and_a_short_one_is_not(tmp_path):
    text = Text.load(model_directory(tmp_path), settings.Text(inline_chars=1000))

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("text")}

    before = threads()
    await text.encode(["stone " * 10])
    assert threads() == before
    (token_ids,) = await text.encode(["stone " * 1000])
    assert threads() - before
    assert text.decode(token_ids) == "stone " * 1000


LONG = "stone " * 1000
CALLS = [ToolCall(FunctionCall("see", {"what": LONG})), ToolCall(FunctionCall("see", "{}"), LONG)]


@pytest.mark.parametrize(
    "asked",
    [
        (HELLO, [{"type": "function", "function": {"name": "see", "description": LONG}}]),
        (HELLO, None, {"documents": [LONG]}),
        ([Message("user", "Hello", name=LONG)],),
        ([Message("tool", "Hello", tool_call_id=LONG)],),
        *[([*HELLO, Message("assistant", None, tool_calls=[call])],) for call in CALLS],
    ],
)
async def test_whatever_makes_a_conversation_long_is_read_on_a_thread(tmp_path, asked):
    text = Text.load(model_directory(tmp_path), settings.Text(inline_chars=1000))
    ran_on: list[threading.Thread] = []
    of_chat = text._templates["default"].render

    def noted(*told: Any) -> str:
        ran_on.append(threading.current_thread())
        return of_chat(*told)

    text._templates["default"].render = noted  # type: ignore[method-assign]
    await text.encode_chat(*asked)
    assert threading.current_thread() not in ran_on


async def test_many_tokens_are_told_as_text_on_a_thread_and_a_few_are_not(tmp_path):
    text = Text.load(model_directory(tmp_path), settings.Text(inline_chars=1000))
    token_ids, main = byte_level().encode("stone ").ids, threading.current_thread()
    ran_on: list[threading.Thread] = []
    of_one = text.vocabulary.token_text

    def noted(token_id: int) -> str:
        ran_on.append(threading.current_thread())
        return of_one(token_id)

    text.vocabulary.token_text = noted  # type: ignore[method-assign]
    assert await text.decoded(token_ids) == "stone "
    assert "".join(await text.token_texts(token_ids)) == "stone "
    assert set(ran_on) == {main}
    assert not text._turns._threads._threads
    ran_on.clear()
    assert await text.decoded(token_ids * 1000) == "stone " * 1000
    assert text._turns._threads._threads
    assert "".join(await text.token_texts(token_ids * 1000)) == "stone " * 1000
    assert main not in ran_on


async def test_only_so_many_long_prompts_wait_for_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "MAX_WAITING", 1)
    text = Text.load(model_directory(tmp_path), settings.Text(inline_chars=1))
    waiting = [asyncio.create_task(text.encode(["stone " * 10_000])) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceUnavailable):
        await text.encode(["too many"])
    waiting[1].cancel()
    await asyncio.wait(waiting)
    assert await text.encode(["room again"])


async def test_whoever_comes_with_a_long_text_does_not_wait_for_all_of_anothers_many(tmp_path):
    text = Text.load(model_directory(tmp_path))
    many, pair = ["stone " * 900 + str(number) for number in range(40)], ("stone", "river " * 2000)
    ended: list[str] = []

    async def noted(name: str, reading: Awaitable[list[Any]]) -> list[Any]:
        read = await reading
        ended.append(name)
        return read

    async def both(reading: Awaitable[list[Any]]) -> list[Any]:
        ended.clear()
        read, _ = await asyncio.gather(noted("many", reading), noted("one", text.encode(["river " * 2000])))
        assert ended == ["one", "many"]
        return read

    assert await both(text.encode(many)) == [(await text.encode([each]))[0] for each in many]
    beginnings = await both(text.encode(many, cut_at=300))
    assert beginnings == [(await text.encode([each], cut_at=300))[0] for each in many]
    assert await both(text.cut(many, 800)) == [(await text.cut([each], 800))[0] for each in many]
    pairs = [("river", each) for each in many]
    read = await both(text.encode_pairs([*pairs, pair], 10_000, "documents"))
    assert read == [(await text.encode_pairs([each], 10_000, "documents"))[0] for each in [*pairs, pair]]


async def test_a_vast_text_is_read_beside_others_which_do_not_wait_for_it(tmp_path):
    text = Text.load(model_directory(tmp_path))
    vast = asyncio.create_task(text.encode(["stone " * 300_000], tenant_id="grey"))
    await asyncio.sleep(0)
    assert await text.encode(["river " * 1000], tenant_id="blue")
    assert not vast.done()
    await vast


async def test_a_text_that_the_tokenizer_cannot_read_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    text = a_text(tmp_path, tokenizer=tokenizer)
    with pytest.raises(InvalidRequest, match="tokenised"):
        await text.encode(["b"])


async def test_a_text_on_which_the_tokenizers_library_panics_is_refused_and_holds_up_nobody(tmp_path):
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    endless = pre_tokenizers.Split(Regex("(?:x+x+)+y"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([endless, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    text = a_text(tmp_path, tokenizer=tokenizer, template="{{ messages[0].content }}")
    hard, long = "x" * 40, "x" * 40 + " river" * 2000
    reads = [
        *[text.encode_chat([Message("user", said)]) for said in (hard, "Hello", long)],
        *[each for said in (hard, long) for each in (text.encode([said]), text.encode([said], cut_at=9))],
        text.encode_pairs([("river", hard)], 1000, "documents"),
        text.cut([hard], 9),
    ]
    answers = await asyncio.gather(*reads, return_exceptions=True)
    assert answers.pop(1) == byte_level().encode("Hello").ids
    assert {str(answer) for answer in answers} == {
        "The prompt cannot be tokenised: Onig: Regex search error: retry-limit-in-match over"
    }


async def test_padding_and_truncation_of_training_are_off(tmp_path):
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    text = a_text(tmp_path, tokenizer=tokenizer)
    assert await text.encode(["one two three four"]) == [byte_level().encode("one two three four").ids]


async def test_a_model_that_spells_no_bytes_is_served_too(tmp_path):
    text = a_text(tmp_path, tokenizer=word_pieces())
    (token_ids,) = await text.encode(["the river"])
    assert text.decoder().feed(token_ids) == "the river"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"{}", "cannot be read as a tokenizer"),
        ("tokenizer.json", b"\xff", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", b"{", "cannot be read"),
        ("tokenizer_config.json", b"[]", "holds no JSON object"),
        ("chat_template.jinja", b"{% if %}", "the chat template is not valid"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_a_broken_directory_is_one_sentence(tmp_path, name, content, said):
    path = model_directory(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(TextInvalid, match=said) as broken:
        Text.load(tmp_path)
    assert "\n" not in str(broken.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled: "),
        ({"normalizer": {"type": "Prepend", "prepend": ""}}, "index out of bounds: "),
        ({"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}}, "WordLevel error: Missing "),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}}, "a token of it has the id 4294967295"),
    ],
    ids=["its library panics", "its library panics later", "nothing for what is unknown", "an id beyond all"],
)
def test_a_tokenizer_that_cannot_work_is_one_sentence(tmp_path, changes, said):
    path = model_directory(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(TextInvalid, match=f"the tokenizer of .* cannot be used: {said}") as broken:
        Text.load(tmp_path)
    assert str(broken.value).isprintable()


def test_a_pipe_in_place_of_a_file_is_one_sentence(tmp_path):
    path = model_directory(tmp_path) / "tokenizer_config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TextInvalid, match=r"tokenizer_config.json cannot be read: it is no regular file"):
        Text.load(tmp_path)


def test_a_directory_needs_no_more_than_a_tokenizer(tmp_path):
    directory = model_directory(tmp_path, template=None)
    (directory / "tokenizer_config.json").unlink()
    assert Text.load(directory).decode(byte_level().encode("stone").ids) == "stone"
