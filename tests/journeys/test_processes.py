"""Several gateway processes on one port: they come, share, are replaced, and leave together."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders import PATIENCE_S, until
from tests.family import Family, answered_by, family, is_alive, sharing

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}


@pytest.fixture
def shared(redis_settings, postgres):
    """The environment of a house with three gateways."""
    return sharing(redis_settings, postgres, 3)


@pytest.fixture
async def scripted_demo(start_scripted_worker):
    """The environment that has answers of 20 tokens, 10 ms apart."""
    return answered_by(await start_scripted_worker("--num-tokens", 20, "--step-s", 0.01))


async def statuses(house: Family, num_requests: int, **others: object) -> list[int]:
    async with house.http() as session:

        async def ask() -> int:
            async with session.post("/v1/chat/completions", json={**CHAT, **others}) as answer:
                await answer.read()
                return answer.status

        return await asyncio.gather(*(ask() for _ in range(num_requests)))


async def test_several_gateways_answer_with_one_worker_that_is_there_while_any_of_them_uses_it(tmp_path, shared):
    on_demand = {"PENSTOCK_MODELS__DEMO__LOAD_AT_START": "false", "PENSTOCK_MODELS__DEMO__IDLE_UNLOAD_S": "0.5"}
    async with family(tmp_path, **shared, **on_demand) as house:
        assert (len(house.gateways()), house.workers()) == (3, [])
        assert await statuses(house, 24) == [200] * 24
        await until(lambda: not house.workers())
        assert await statuses(house, 4) == [200] * 4
        gateways, workers = house.gateways(), house.workers()
        assert await house.end() == 0
        assert not any(map(is_alive, [*gateways, *workers]))


async def test_a_gateway_that_is_shot_is_replaced_while_the_others_go_on(tmp_path, shared, scripted_demo):
    async with family(tmp_path, **shared, **scripted_demo) as house:
        shot, *others = house.gateways()
        os.kill(shot, signal.SIGKILL)
        await until(lambda: not is_alive(shot))
        assert await statuses(house, 12) == [200] * 12
        await until(lambda: len(house.gateways()) == 3)
        assert set(others) < set(house.gateways())
        assert await house.end() == 0


async def test_a_signal_has_all_tell_everything_those_that_start_among_them_and_ends_none(
    tmp_path, shared, scripted_demo
):
    async with family(tmp_path, **shared, **scripted_demo) as house:

        def num_told(level: str) -> int:
            return sum(line.endswith(f"log: from {level} up") for line in house.told)

        shot, *_ = house.gateways()
        os.kill(shot, signal.SIGKILL)
        await until(lambda: not is_alive(shot))
        house.process.send_signal(signal.SIGUSR1)
        await until(lambda: num_told("debug") == 4)  # the first process, two gateways, and the third when it is ready
        house.process.send_signal(signal.SIGUSR1)
        await until(lambda: num_told("info") == 4)
        assert sum("gateway" in line and "lost: it was killed" in line for line in house.told) == 1
        assert await house.end() == 0


async def test_whichever_gateway_is_asked_tells_the_metrics_of_all_and_of_the_dead(tmp_path, shared, scripted_demo):
    async with family(tmp_path, **shared, **scripted_demo, PENSTOCK_METRICS__ACCESS="open") as house:

        async def told() -> tuple[float, float]:
            """Requests and gateways, by whichever answers a new connection."""
            async with house.http() as session, session.get("/metrics") as answer:
                families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
            requests = families["penstock_requests"].samples if "penstock_requests" in families else []
            (gateways,) = families["penstock_gateway_processes"].samples
            return sum(sample.value for sample in requests), gateways.value

        async def until_told(expected: tuple[float, float]) -> None:
            async with asyncio.timeout(PATIENCE_S):
                num_same = 0
                while num_same < 12:
                    num_same = num_same + 1 if await told() == expected else 0
                    await asyncio.sleep(0.05)

        assert await statuses(house, 24) == [200] * 24
        await until_told((24, 3))
        shot = house.gateways()[0]
        os.kill(shot, signal.SIGKILL)
        await until(lambda: not is_alive(shot) and len(house.gateways()) == 3)
        await until_told((24, 3))
        assert await house.end() == 0


async def test_a_model_that_is_given_up_is_said_once_and_told_by_the_metrics_of_all(tmp_path, shared, scripted_demo):
    broken = {"PENSTOCK_MODELS__BROKEN__SOURCE": "nowhere/at/all"}
    async with family(tmp_path, **shared, **scripted_demo, **broken) as house:
        async with house.http(house.admin_key) as session, session.get("/metrics") as answer:
            assert 'penstock_workers{model="broken",state="given_up"} 1' in await answer.text()
        assert await statuses(house, 2, model="broken") == [404, 404]
        assert await house.end() == 0
        assert len([line for line in house.told if "model broken: there is no directory nowhere" in line]) == 1


async def test_a_limit_does_not_multiply_by_the_number_of_gateways(tmp_path, shared, scripted_demo):
    policy = {"PENSTOCK_POLICIES__DEFAULT": "{limits = {requests_per_minute = 10}}"}
    async with family(tmp_path, **shared, **scripted_demo, **policy) as house:
        answers = await statuses(house, 60)
        assert (answers.count(200), answers.count(429)) == (10, 50)


async def test_a_thousand_requests_at_once_use_no_token_above_one_limit(tmp_path, shared, start_scripted_worker):
    options = ("--max-sequences", 1000, "--num-blocks", 50_000, "--tokens-per-step", 100)
    policy = {"PENSTOCK_POLICIES__DEFAULT": "{limits = {tokens_per_minute = 100000}}"}
    environ = {**shared, **answered_by(await start_scripted_worker(*options)), **policy}
    async with family(tmp_path, **environ) as house, house.http(timeout_s=4 * PATIENCE_S) as session:

        async def ask() -> int | None:
            """Tokens used; None: refused."""
            async with session.post("/v1/chat/completions", json={**CHAT, "max_tokens": 400}) as answer:
                body = await answer.json()
                assert answer.status in (200, 429), body
                assert answer.status == 200 or float(answer.headers["retry-after"]) >= 1
                return body["usage"]["total_tokens"] if answer.status == 200 else None

        used = await asyncio.gather(*(ask() for _ in range(1000)))
        answered = [num_tokens for num_tokens in used if num_tokens is not None]
        assert 99_000 < sum(answered) <= 100_000
        assert 200 < len(answered) < 400  # three limits would have let in more than twice as many
        assert await house.end() == 0


async def test_a_stop_lets_every_gateways_streams_finish(tmp_path, shared, scripted_demo):
    async with family(tmp_path, **shared, **scripted_demo) as house, house.http() as session:
        answers = await asyncio.gather(
            *(session.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20, "stream": True}) for _ in range(12))
        )
        house.process.send_signal(signal.SIGINT)
        bodies = await asyncio.gather(*(answer.read() for answer in answers))
        assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
        assert await house.process.wait() == 0


async def test_when_the_first_process_is_shot_nothing_of_it_stays(tmp_path, shared):
    async with family(tmp_path, **shared) as house:
        everybody = [*house.gateways(), *house.workers()]
        house.process.kill()
        await until(lambda: not any(map(is_alive, everybody)))


async def test_a_model_that_cannot_be_loaded_is_one_sentence_and_the_end(tmp_path, shared):
    with pytest.raises(AssertionError, match="there is no directory nowhere") as caught:
        async with family(tmp_path, **shared, PENSTOCK_MODELS__DEMO__SOURCE="nowhere/at/all"):
            pass
    assert len(str(caught.value).splitlines()) == 1
