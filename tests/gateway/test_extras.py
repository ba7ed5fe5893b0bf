"""What vLLM and SGLang take beside OpenAI's fields: done, refused by name, or of no consequence here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from gateway import openai
from gateway.openai.extras import EXTRAS, ReadingExtras
from gateway.responses.requests import ResponseRequest
from policies.wire import TokenLogprob
from tests.gateway.conftest import HELLO, Front
from tests.gateway.responding import END, ask
from tests.gateway.test_official_fields import fields
from tests.gateway.texts import byte_level

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "demo", "messages": HELLO}),
    "text": ("/v1/completions", {"model": "demo", "prompt": "Hello"}),
    "response": ("/v1/responses", {"model": "demo", "input": "Hello"}),
    "count": ("/v1/responses/input_tokens", {"model": "demo", "input": "Hello"}),
    "vector": ("/v1/embeddings", {"model": "demo", "input": "Hello"}),
    "ranking": ("/v1/rerank", {"model": "demo", "query": "Hello", "documents": ["Hello"]}),
    "score": ("/v1/score", {"model": "demo", "text_1": "Hello", "text_2": "Hello"}),
}
UNSERVED: dict[str, Any] = {
    "add_generation_prompt": False,
    "custom_logit_processor": "x",
    "documents": [{"text": "x"}],
    "guided_whitespace_pattern": " ",
    "input_ids": [5],
    "logits_processors": ["x"],
    "logprob_token_ids": [5],
    "lora_path": "x",
    "priority": 5,
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 0,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "return_hidden_states": True,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "separate_reasoning": False,
    "session_params": {"id": "x"},
    "skip_special_tokens": False,
    "stop_regex": "x",
    "thinking_token_budget": 0,
    "truncate_prompt_tokens": -1,
    "use_beam_search": True,
    "vllm_xargs": {"x": 1},
    "watermarking": True,
}
OF_NUMBERS: dict[str, Any] = {
    "add_special_tokens": False,
    "embed_dtype": "float16",
    "endianness": "big",
    "normalize": False,
    "padding": "max_length",
    "priority": 5,
    "truncation_side": "left",
    "use_activation": False,
}
OF_ONE = [
    ("chat", "echo", True),
    ("chat", "add_special_tokens", True),
    ("response", "enable_response_messages", True),
    ("response", "previous_input_messages", []),
]
OUTPUTS: dict[str, Any] = {
    "structural_tag": "{}",
    "whitespace_pattern": " ",
    "disable_any_whitespace": True,
    "disable_additional_properties": True,
}
AS_IT_IS: dict[str, Any] = {
    **dict.fromkeys(EXTRAS),
    **{"add_generation_prompt": True, "bad_words": [], "include_reasoning": True, "logits_processors": []},
    **{"priority": 0, "separate_reasoning": True, "skip_special_tokens": True, "thinking_token_budget": -1},
    **{"use_beam_search": False, "return_token_ids": False, "vllm_xargs": {}, "watermarking": False},
}
WITHOUT_EFFECT = {
    *("request_id", "session_id", "stream_interval", "length_penalty", "spaces_between_special_tokens"),
    *("truncation_side", "mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params", "ec_transfer_params"),
    *("routed_experts_prompt_start", "return_token_offsets", "return_mm_kwargs"),
}
OF_VLLM = {
    *("use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids"),
    *("bad_words", "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id"),
    *("session_id", "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "cache_salt"),
    *("return_token_offsets", "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    *("repetition_detection", "thinking_token_budget", "stream_interval"),
}
OF_ITS_CHATS = {
    *("include_reasoning", "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text", "reasoning_effort"),
}
OF_ITS_RESPONSES = {
    *("logit_bias", "include_reasoning", "skip_special_tokens", "include_stop_str_in_output", "presence_penalty"),
    *("frequency_penalty", "watermarking", "request_id", "session_id", "media_io_kwargs", "mm_processor_kwargs"),
    *("priority", "cache_salt", "enable_response_messages", "previous_input_messages", "structured_outputs", "seed"),
    *("repetition_penalty", "stop", "ignore_eos", "vllm_xargs", "kv_transfer_params", "chat_template_kwargs", "top_k"),
}
LOGPROB = TokenLogprob(-1.0, [], [])


def test_every_field_of_vllms_is_known():
    assert fields(openai.ChatRequest) | WITHOUT_EFFECT >= OF_VLLM | OF_ITS_CHATS
    assert OF_VLLM | {"prompt_embeds"} <= fields(openai.CompletionRequest) | WITHOUT_EFFECT
    assert fields(ResponseRequest) | WITHOUT_EFFECT >= OF_ITS_RESPONSES
    assert set(UNSERVED) == set(EXTRAS)
    assert set(OF_NUMBERS) == fields(ReadingExtras)


async def test_what_would_change_the_answer_is_refused_by_name(front: Front):
    wrong = [(kind, *each) for kind in ("chat", "text", "response", "count") for each in UNSERVED.items()]
    wrong += [(kind, *each) for kind in ("vector", "ranking", "score") for each in OF_NUMBERS.items()]
    for kind, name, value in [*wrong, *OF_ONE]:
        path, body = ASKED[kind]
        status, answer, _ = await front.post(path, {**body, name: value})
        assert (status, answer["error"].get("param")) == (400, name), (kind, name, answer)
        assert answer["error"]["code"] == "unsupported_parameter"
    for name, value in OUTPUTS.items():
        path, body = ASKED["chat"]
        status, answer, _ = await front.post(path, {**body, "structured_outputs": {name: value, "regex": "a"}})
        assert (status, answer["error"].get("param")) == (400, f"structured_outputs.{name}")
    assert front.rows() == []


@pytest.mark.parametrize("kind", ["chat", "text", "response"])
async def test_what_is_so_anyway_may_be_said(front: Front, kind: str):
    path, body = ASKED[kind]
    call = asyncio.create_task(front.post(path, {**body, **AS_IT_IS}))
    front.peer.say(await front.peer.submitted(), [*front.ids("Yes."), END], "stop")
    status, answer, _ = await call
    assert status == 200, answer


async def test_tokens_and_words_that_are_not_wanted_are_told_to_the_worker(front: Front):
    wishes = {"allowed_token_ids": [5, 7, 9], "bad_words": ["a white stone", "river", " river"]}
    for kind in ("chat", "text", "response"):
        path, body = ASKED[kind]
        call = asyncio.create_task(front.post(path, {**body, **wishes}))
        submit = await front.peer.submitted()
        assert submit.sampling.allowed_token_ids == (5, 7, 9)
        texts = [front.text.decode(word) for word in submit.sampling.bad_words]
        assert {text.strip() for text in texts} == {"a white stone", "river"}
        assert len(set(submit.sampling.bad_words)) == len(texts)
        front.peer.say(submit, [*front.ids("Yes."), END], "stop")
        assert (await call)[0] == 200
        for name, value, param in (
            ("allowed_token_ids", [], "allowed_token_ids"),
            ("allowed_token_ids", [100_000], "allowed_token_ids"),
            ("allowed_token_ids", ["a"], "allowed_token_ids[0]"),
            ("bad_words", [""], "bad_words[0]"),
            ("bad_words", "river", "bad_words"),
        ):
            status, answer, _ = await front.post(path, {**body, name: value})
            assert (status, answer["error"]["param"]) == (400, param), (kind, name, value, answer)


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_told_where_it_is_asked_for(front: Front, stream: bool, name: str):
    call = front.chat(stop=["\n\nHuman:"], stream=stream, n=2, logprobs=True, extra_body={name: True})
    submit = await front.peer.submitted()
    tokens, others = front.ids("Yes.\n\nHuman: and"), [*front.ids("No."), END]
    front.peer.say(submit, tokens, logprobs=[LOGPROB] * len(tokens))
    front.peer.say(submit, others, "stop", index=1, logprobs=[LOGPROB] * len(others))
    front.peer.say(submit, [], "cancelled")
    answer = await call
    if stream:
        chunks = [chunk.choices[0] async for chunk in answer]
        said = ["".join(each.delta.content or "" for each in chunks if each.index == number) for number in (0, 1)]
    else:
        said = [choice.message.content for choice in answer.choices]
        assert "".join(entry.token for entry in answer.choices[0].logprobs.content) == "Yes.\n\nHuman:"
    assert said == ["Yes.\n\nHuman:", "No."]


async def test_there_may_be_as_many_stop_strings_as_an_editor_sends(front: Front):
    stops = ["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>", "<|file_sep|>", "/src/", "```", "\n\n", "stone"]
    for path, body in (ASKED["chat"], ASKED["text"]):
        call = asyncio.create_task(front.post(path, {**body, "stop": stops}))
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("a white stone here"))
        await front.peer.cancelled()
        front.peer.say(submit, [], "cancelled")
        status, answer, _ = await call
        (choice,) = answer["choices"]
        assert (status, choice.get("text") or choice["message"]["content"]) == (200, "a white ")


@pytest.mark.parametrize("stream", [False, True])
async def test_no_stop_string_ends_an_answer_before_its_least_tokens(front: Front, stream: bool):
    first, then = front.ids("a stone and"), front.ids(" one stone more")
    call = front.chat(stop=["stone"], stream=stream, extra_body={"min_tokens": len(first)})
    submit = await front.peer.submitted()
    front.peer.say(submit, first)
    front.peer.say(submit, then)
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    answer = await call
    if stream:
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    else:
        said = answer.choices[0].message.content
    assert said == "a stone and one "


async def test_so_is_the_token_that_ends_a_text(front: Front):
    stone = front.ids("stones")[0]
    extras = {"stop_token_ids": [stone], "include_stop_str_in_output": True}
    call = asyncio.create_task(front.client.completions.create(model="demo", prompt="One", extra_body=extras))
    front.peer.say(await front.peer.submitted(), [*front.ids(" white "), stone], "stop")
    assert (await call).choices[0].text == " white " + front.text.decode([stone])


async def test_a_completion_is_asked_for_without_special_tokens(open_front):
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    async with open_front(model={"tokenizer": tokenizer}) as front:
        read = []
        for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            body = {"model": "demo", "prompt": "The miller", **given}
            call = asyncio.create_task(front.post("/v1/completions", body))
            submit = await front.peer.submitted()
            read.append(front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False))
            front.peer.say(submit, [END], "stop")
            assert (await call)[0] == 200
        assert read[0] == read[1]
        assert read[0] == "<s>" + read[2] == "<s>The miller"


async def test_a_response_takes_what_a_chat_does(front: Front):
    extras = {
        **{"stop": ["stone"], "include_stop_str_in_output": True, "ignore_eos": True, "logit_bias": {"5": -100}},
        **{"min_tokens": 1, "stop_token_ids": [7], "structured_outputs": {"choice": ["a stone", "a river"]}},
    }
    call = ask(front, max_output_tokens=20, extra_body=extras)
    submit = await front.peer.submitted()
    assert (submit.sampling.ignore_eos, submit.sampling.logit_bias) == (True, {5: -100.0})
    assert (submit.sampling.min_tokens, submit.sampling.stop_token_ids) == (1, (7,))
    assert submit.grammar.kind == "choice"
    front.peer.say(submit, front.ids("a stone here"))
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    assert (await call).output_text == "a stone"
    status, answer, _ = await front.post("/v1/responses", {**ASKED["response"][1], "stop": [""]})
    assert (status, answer["error"]["param"]) == (400, "stop[0]")
