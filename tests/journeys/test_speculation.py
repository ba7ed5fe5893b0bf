"""Answers that are guessed at against answers that are not, through HTTP: the real gateway, the demo model in two real
workers, one of which guesses as if it cost nothing and loses blocks, the other never. In deterministic mode they are
the same, to the log-probabilities' last bit."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from policies import settings
from tests.builders import until
from tests.failing_worker import CURSED
from tests.house import running
from tests.journeys.test_grammars import STRICT

BEGINNINGS = [
    "Once upon a time there was a little fox who lived near the river. ",
    "One, two, three, four, five, six, seven, one, two, three, four, five, six, seven, one, two. ",
    "Ann is 30 and lives in Paris. Ben is 31 and lives in Rome. Cleo is 32 and lives in Oslo. ",
]
ENDINGS = ["Once upon a time there was a little", "What is 3 + 4?", "Say all that again.", "One, two, three, four,"]
GRAMMARS = [
    {},
    {},
    {},
    {"structured_outputs": {"regex": "(one, two, ){2,12}three"}},
    {"guided_choice": ["one, two, three, four, five", "one, two, three, six"]},
]
NUM_ASKED = 64
LOG = "workers.log"


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Two models under one roof, "guessing" and "plain", of few blocks. What their workers log is in LOG."""
    directory = tmp_path_factory.mktemp("house")
    command = f'exec "$0" -m tests.guessing_worker "$@" 2>> {shlex.quote(str(directory / LOG))}'
    engine = settings.Engine(
        device="cpu", dtype="bfloat16", deterministic=True, num_threads=1, block_size=16, max_kv_bytes=5 << 19
    )
    plain = msgspec.structs.replace(engine, speculation=settings.Speculation(enabled=False))
    with running(
        directory,
        ("sh", "-c", command, sys.executable),
        models={"guessing": settings.Model(engine=engine), "plain": settings.Model(engine=plain)},
        cache=settings.Cache(max_bytes=0),
    ) as house:
        yield house


def asked(rng, number):
    """Where, and for what: any mix of what a request may ask for."""
    beginning = "".join(rng.choices(BEGINNINGS, k=rng.randint(1, 3)))
    text = f"{beginning}{rng.choice(ENDINGS)}"
    max_tokens = rng.randint(1, 100)
    body = {
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, max_tokens // 2]),
        "seed": number,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.2]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 0, 20]),
        "min_p": rng.choice([0.0, 0.0, 0.05]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.5]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.4]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.1]),
        "logit_bias": rng.choice([{}, {}, {"300": 2.0, "301": -100}]),
        "stop": rng.choice([[], [], [], ["six", "\n\n"]]),
        "ignore_eos": rng.random() < 0.6,
        "n": rng.choice([1, 1, 4]),
        "stream": rng.random() < 0.5,
        **rng.choice(GRAMMARS),
    }
    if rng.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": text}], **rng.choice([{}, {"response_format": STRICT}])}
        if "response_format" in body:
            body = {key: value for key, value in body.items() if key not in ("structured_outputs", "guided_choice")}
        body |= rng.choice([{}, {"logprobs": True, "top_logprobs": rng.choice([0, 3])}])
        body |= rng.choice([{}, {"prediction": {"type": "content", "content": beginning}}])
        return "/v1/chat/completions", body
    return "/v1/completions", {"prompt": text, "logprobs": rng.choice([None, 0, 3]), **body}


async def answered(http, path, body):
    """What of each choice does not change from one time to another."""
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        if not body["stream"]:
            choices = (await response.json())["choices"]
        else:
            choices = []
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    choices += event["choices"]
    told = {}
    for choice in choices:
        said = told.setdefault(choice["index"], {"text": "", "reason": None, "logprobs": []})
        message = choice.get("message") or choice.get("delta") or {}
        said["text"] += choice.get("text") or message.get("content") or ""
        said["reason"] = choice["finish_reason"] or said["reason"]
        if (logprobs := choice.get("logprobs")) is not None:
            said["logprobs"] += logprobs.get("content") or list(
                zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"] or [], strict=False)
            )
    return told


def stats(house):
    """By model."""
    return {worker.facts.model: worker.stats for worker in house.gw.dispatch.workers()}


async def test_answers_to_anything_are_the_same_with_guesses_and_without(house):
    rng = random.Random(9)
    wanted = [asked(rng, number) for number in range(NUM_ASKED)]
    await until(lambda: all(worker.facts for worker in house.gw.dispatch.workers()))
    async with house.http() as http:

        async def all_of(model):
            return await asyncio.gather(*[answered(http, path, {"model": model, **body}) for path, body in wanted])

        guessed, plain = await asyncio.gather(all_of("guessing"), all_of("plain"))
        for (path, body), mine, theirs in zip(wanted, guessed, plain, strict=True):
            assert mine == theirs, (path, body)
        # Alone, behind prefixes that are there already.
        for path, body in wanted[::8]:
            assert await answered(http, path, {"model": "guessing", **body}) in (plain[wanted.index((path, body))],)
    await house.quiet()
    found = stats(house)
    assert found["plain"].num_drafts == found["plain"].num_drafted_tokens == 0
    assert found["guessing"].num_drafted_tokens > 2 * found["guessing"].num_accepted_tokens > 500
    assert 0 < found["guessing"].num_drafts <= found["guessing"].num_drafted_tokens
    assert found["guessing"].num_preemptions > 20
    assert found["guessing"].num_cached_tokens > 0
    assert found["guessing"].num_used_blocks == found["guessing"].num_drafter_faults == 0
    rows = await house.ledger_rows(status=200)
    assert sum(row.num_drafted_tokens for row in rows) == found["guessing"].num_drafted_tokens
    assert sum(row.num_accepted_tokens for row in rows) == found["guessing"].num_accepted_tokens


async def test_a_drafter_that_raises_is_switched_off_for_that_request_counted_and_logged(house):
    await until(lambda: all(worker.facts for worker in house.gw.dispatch.workers()))
    asked = {"max_tokens": 80, "temperature": 0, "ignore_eos": True, "stream": False}
    async with house.http() as http:

        async def told(model, prompt):
            return await answered(http, "/v1/completions", {"model": model, "prompt": prompt, **asked})

        text = [300, 301, 302] * 8
        prompts = [[CURSED, *text], text, [CURSED, 305, *text]]
        plain, guessed = [
            await asyncio.gather(*[told(model, prompt) for prompt in prompts]) for model in ("plain", "guessing")
        ]
    assert guessed == plain
    await house.quiet()
    assert stats(house)["guessing"].num_drafter_faults == 2
    # The others still guess for those two.
    rows = await house.ledger_rows(model="guessing", num_completion_tokens=80)
    assert len(rows) >= 3
    assert all(row.num_drafted_tokens for row in rows)
    said = (Path(house.config.store.data_dir) / LOG).read_text()
    assert said.count("drafter suffix is switched off for request") == 2
    assert said.count("ValueError: this one cannot be drafted for") >= 2
