"""POST /tokenize and /detokenize: what a model reads, in vLLM's shapes."""

from __future__ import annotations

import asyncio

import pytest

from tests.builders import PATIENCE_S
from tests.gateway.conftest import HELLO, Front


async def test_a_text_is_told_as_tokens_and_back(front: Front):
    status, told, _ = await front.post("/tokenize", {"model": "demo", "prompt": "The river", "return_token_strs": True})
    assert status == 200
    assert told["tokens"] == front.ids("The river")
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 4096)
    assert "".join(told["token_strs"]) == "The river"
    status, back, _ = await front.post("/detokenize", {"tokens": told["tokens"]})
    assert (status, back) == (200, {"prompt": "The river"})
    assert front.rows() == [], "nobody owes anything for it"


async def test_a_conversation_is_told_as_the_model_reads_it(front: Front):
    _, told, _ = await front.post("/tokenize", {"messages": HELLO})
    _, unopened, _ = await front.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False})
    _, back, _ = await front.post("/detokenize", {"tokens": told["tokens"]})
    call = front.chat()
    submit = await front.peer.submitted()
    front.peer.say(submit, [3], "stop")
    await call
    assert told["tokens"] == submit.prompt_token_ids
    assert told["token_strs"] is None
    assert back["prompt"] == f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert told["tokens"][: unopened["count"]] == unopened["tokens"] != told["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", b"{", 400, None),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "another"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**40]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_told_is_refused(front: Front, path, body, status, param):
    answered, answer, _ = await front.post(path, body)
    assert (answered, answer["error"]["param"]) == (status, param), answer


async def test_an_id_that_the_vocabulary_has_not_has_no_text(front: Front):
    async with asyncio.timeout(PATIENCE_S):
        status, back, _ = await front.post("/detokenize", {"tokens": [2**31 - 1]})
    assert (status, back) == (200, {"prompt": ""})
