"""Adapters through the whole house: real workers on the demo model, the admin API, and what PEFT says."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import peft
import pytest
import torch
import transformers

import demo
from policies import settings
from tests import house as houses
from tests.builders import until

MAX_TOKENS = 12
PROMPTS = ["Once there was a fox", "The capital of France is", "Hello, how are you"]


class Adapters:
    """Files for the demo model, and PEFT's greedy answers with them."""

    def __init__(self, directory):
        self.directory = directory
        base = transformers.AutoModelForCausalLM.from_pretrained(str(demo.MODEL_DIR), dtype=torch.float32)
        self._model = base.eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(demo.MODEL_DIR))

    def made(self, name, seed):
        """Its directory."""
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        changed = peft.get_peft_model(self._model, config)
        with torch.no_grad():
            for parameter_name, parameter in changed.named_parameters():
                if "lora_" in parameter_name:
                    parameter.copy_(torch.randn_like(parameter) * 0.05)
        changed.save_pretrained(str(self.directory / name))
        self._model = changed.unload()
        return str(self.directory / name)

    def says(self, source, prompt):
        """By the base where there is no source."""
        model = self._model if source is None else peft.PeftModel.from_pretrained(self._model, source)
        ids = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
        )
        if source is not None:
            self._model = model.unload()
        return self._tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def house(tmp_path, adapters):
    engine = settings.Engine(device="cpu", dtype="float32", num_threads=1, max_kv_bytes=32 << 20, max_step_tokens=16)
    model = settings.Model(engine=engine, replicas=2, adapters={"first": adapters.made("first", 1)})
    workers = settings.Workers(restart_backoff_s=0.1)
    with houses.running(tmp_path / "data", models={"demo": model}, workers=workers) as house:
        yield house


async def said(house, model, prompt):
    async with house.client() as client:
        answer = await client.completions.create(
            model=model,
            prompt=prompt,
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_headers={"cache-control": "no-store"},
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text


async def admin(house, method, path, body=None):
    async with (
        house.http(house.admin_key) as session,
        session.request(method, f"/admin/v1/{path}", json=body) as answer,
    ):
        return answer.status, json.loads(await answer.read())


async def test_what_adapters_say_is_what_peft_says_on_every_worker_through_swaps_refusals_and_crashes(
    house, adapters, tmp_path
):
    first, second, third = (adapters.made(name, seed) for name, seed in (("first", 1), ("second", 2), ("third", 3)))
    await until(lambda: len([each for each in house.gw.dispatch.workers() if each.facts]) == 2)
    status, body = await admin(house, "POST", "adapters", {"name": "second", "model": "demo", "source": second})
    assert (status, body.get("rank")) == (201, 4), body

    async def all_say(sources):
        expected = {
            (model, prompt): adapters.says(source, prompt) for model, source in sources.items() for prompt in PROMPTS
        }
        asked = [place for place in expected for _ in range(2)]
        got = await asyncio.gather(*(said(house, *place) for place in asked))
        assert list(zip(asked, got, strict=True)) == [(place, expected[place]) for place in asked]

    await all_say({"demo": None, "first": first, "second": second})

    (tmp_path / "broken").mkdir()
    refused = {"name": "third", "model": "demo", "source": str(tmp_path / "broken")}
    status, body = await admin(house, "POST", "adapters", refused)
    assert (status, body["fields"][0]["name"]) == (400, "source")
    assert "has no adapter_config.json" in body["detail"]

    status, body = await admin(house, "POST", "adapters", {"name": "first", "model": "demo", "source": third})
    assert (status, body["version"]) == (201, 2)
    await all_say({"demo": None, "first": third, "second": second})

    lives = sum(worker.num_lives for worker in house.gw.dispatch.workers())
    for worker in house.gw.dispatch.workers():
        os.kill(worker.facts.pid, signal.SIGKILL)
    await until(lambda: sum(worker.num_lives for worker in house.gw.dispatch.workers()) == lives + 2)
    await until(lambda: all(worker.facts for worker in house.gw.dispatch.workers()))
    await all_say({"first": third, "second": second})

    assert (await admin(house, "DELETE", "adapters/second"))[0] == 200
    async with house.http() as session, session.get("/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["demo", "first"]
    async with house.http() as session:
        call = {"model": "second", "prompt": "a"}
        async with session.post("/v1/completions", json=call) as answer:
            assert answer.status == 404
    log = await admin(house, "GET", "audit_log?object_kind=adapter")
    assert [entry["action"] for entry in log[1]["data"]] == ["adapter.loaded", "adapter.loaded", "adapter.unloaded"]
    rows = await house.ledger_rows(model="first")
    assert len(rows) == 3 * 2 * len(PROMPTS)
    assert all(row.num_completion_tokens == MAX_TOKENS for row in rows)
