"""Bodies of many numbers: the same JSON as any, made while everybody else has a turn."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
import pytest

from gateway import openai, reply
from gateway.reply import long
from gateway.text import Text
from policies import settings, wire
from policies.terms import Sampling
from tests.gateway.conftest import HELLO, Front
from tests.gateway.elsewhere import elsewhere
from tests.gateway.test_upstreams_trouble import garbled
from tests.gateway.texts import model_directory

NUM_TOKENS, TOPS = 80, list(range(4, 24))


def scored(number: int) -> wire.TokenLogprob:
    return wire.TokenLogprob(-0.5 - number, TOPS, [-0.25 - top for top in TOPS])


@pytest.mark.parametrize("receipt", ["false", "true"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/chat"])
async def test_each_of_many_log_probabilities_is_where_it_belongs(front: Front, path, receipt):
    asked = {"model": "demo", "stream": False, "logprobs": 20}
    if path != "/v1/completions":
        asked |= {"messages": HELLO, "logprobs": True, "top_logprobs": 20}
    num = 1 if path == "/api/chat" else 2
    body = {**asked, **({"prompt": "a", "n": num} if path == "/v1/completions" else {"n": num} if num > 1 else {})}
    asking = asyncio.create_task(front.post(path, body, **{"x-penstock-receipt": receipt}))
    submit = await front.peer.submitted()
    token_ids = (front.ids("a river ") * NUM_TOKENS)[:NUM_TOKENS]
    for index in range(num):
        logprobs = [scored(100 * index + place) for place in range(NUM_TOKENS)]
        front.peer.say(submit, token_ids, "length", index=index, logprobs=logprobs)
    status, said, _ = await asking
    assert status == 200
    assert ("penstock" in said) == (receipt == "true" and path != "/api/chat")
    for index, choice in enumerate(said.get("choices", [said])):
        told = choice["logprobs"]
        if path == "/v1/completions":
            values, tops, text = told["token_logprobs"], told["top_logprobs"], "".join(told["tokens"])
        else:
            told = told if path == "/api/chat" else told["content"]
            values, tops = [entry["logprob"] for entry in told], [entry["top_logprobs"] for entry in told]
            text = bytes(byte for entry in told for byte in entry["bytes"]).decode()
        assert values == [-0.5 - (100 * index + place) for place in range(NUM_TOKENS)]
        assert {len(each) for each in tops} <= {20, 21}
        assert text == (choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("form", ["float", "base64", None])
async def test_many_vectors_are_told_in_their_order(open_front, form):
    vectors = [[number + place / 4096 for place in range(512)] for number in range(40)]
    data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 40, "total_tokens": 40}
    body = msgspec.json.encode({"data": data, "usage": usage})
    async with elsewhere(garbled(body)) as far, open_front(upstreams=(far.upstream(kinds=("embeddings",)),)) as front:
        if form is None:
            _, said, _ = await front.post("/api/embed", {"model": "far", "input": ["a"] * 40})
            assert said["embeddings"] == vectors
            return
        said = await front.client.embeddings.create(model="far", input=["a"] * 40, encoding_format=form)
        found = [each.embedding for each in said.data]
        if form == "base64":
            found = [array("f", msgspec.json.decode(f'"{each}"', type=bytes)).tolist() for each in found]
        assert found == vectors
        assert [each.index for each in said.data] == list(range(40))
        assert said.usage.total_tokens == 40


async def test_everybody_has_a_turn_while_a_long_body_is_made(tmp_path):
    text = Text.load(model_directory(tmp_path / "model"), settings.Text())
    call = openai.parse_embedding(msgspec.json.encode({"model": "far", "input": ["a"] * 512}))
    parts = [reply.Part(wire.Submit(f"req_{number}", [1], Sampling(max_tokens=1), 1)) for number in range(512)]
    answer = reply.EmbeddingAnswer(call, parts, text, "fp", "default")
    vector = array("f", [place / 3 for place in range(1024)]).tobytes()
    finish = wire.Finish("stop", 0, 0, 0.0, 0.0, 0.0)
    for part in parts:
        answer.take(wire.Delta(part.submit.request_id, 0, [], finish=finish, vector=vector))
    assert answer.is_long
    making, num_turns = asyncio.create_task(long.body_of(answer)), 0
    while not making.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 10
    assert len(msgspec.json.decode(await making)["data"]) == 512
