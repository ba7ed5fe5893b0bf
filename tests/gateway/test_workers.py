"""Workers that die, fall silent, send garbage or never come: noticed, named, replaced with back-off; others go on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time

import pytest

from gateway import errors, workers
from gateway.channel import Channel
from gateway.clock import Clock
from gateway.dispatch import Dispatch, NothingToServe
from gateway.launcher import Launcher
from policies import settings, wire
from tests import builders
from tests.builders import NO_TEXT, a_submit, answer, dispatching, send, tokens, until
from tests.ports import free_port

SCRIPT = [72, 105, 33, 32]
"""What a scripted worker says, again and again."""
FAST = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.05)


async def reborn(dispatch: Dispatch) -> None:
    """Until the first worker is ready in its second life."""
    worker = dispatch.workers()[0]
    await until(lambda: worker.num_lives == 2 and worker.facts)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("die", "exited with status 7"),
        ("garbage", "broke the protocol: bad frame of 5 bytes"),
        ("stranger", "broke the protocol: a delta for req_of_nobody, which it does not hold"),
    ],
)
async def test_a_worker_at_fault_is_named_and_replaced_and_its_request_goes_on(tmp_path, caplog, fault, named):
    command = builders.scripted("--fault", fault, "--after", 2, "--once", tmp_path / "begun")
    async with dispatching(replicas=1, command=command, workers=FAST) as dispatch:
        assert len(tokens(await answer(send(dispatch, a_submit())))) == 8
        assert tokens(await answer(send(dispatch, a_submit(max_tokens=400)))) == SCRIPT * 100
        await reborn(dispatch)
        assert len(tokens(await answer(send(dispatch, a_submit())))) == 8
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"worker scripted-0 lost: it {named}")


async def test_a_worker_that_falls_silent_is_named_and_replaced_and_its_request_goes_on(tmp_path, clock, caplog):
    command = builders.scripted("--fault", "silence", "--after", 2, "--once", tmp_path / "begun")
    limits = settings.Workers(restart_backoff_s=0.01)
    async with dispatching(replicas=1, command=command, workers=limits, clock=clock) as dispatch:
        assert len(tokens(await answer(send(dispatch, a_submit())))) == 8
        reading = asyncio.create_task(answer(send(dispatch, a_submit(max_tokens=400))))
        await until((tmp_path / "begun").exists)

        def is_lost() -> bool:
            clock.advance(limits.silence_timeout_s)
            return dispatch.workers()[0].facts is None

        await until(is_lost)
        await until(lambda: min(clock.waits()) < 1.0)
        clock.advance(limits.restart_backoff_s)
        assert tokens(await reading) == SCRIPT * 100
        assert dispatch.workers()[0].num_lives == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("worker scripted-0 lost: it said nothing for 30 s")


async def test_a_gateway_that_stood_still_takes_no_worker_for_silent_that_stood_still_with_it(clock, caplog):
    limits = settings.Workers()
    command = builders.scripted("--stats-s", 1e6)
    async with dispatching(replicas=1, command=command, workers=limits, clock=clock) as dispatch:
        assert len(tokens(await answer(send(dispatch, a_submit())))) == 8
        for _ in range(3):
            clock.stand_still(2 * limits.silence_timeout_s)
        clock.stand_still(limits.silence_timeout_s + 0.5)
        assert dispatch.workers()[0].facts is not None
        assert len(tokens(await answer(send(dispatch, a_submit())))) == 8
        clock.advance(1.0)
        assert dispatch.workers()[0].facts is not None
        for _ in range(2):
            clock.advance(limits.silence_timeout_s)
        assert dispatch.workers()[0].facts is None  # from the last look on it was listened to
        await until(lambda: "scripted-0 lost: it said nothing for 30 s" in caplog.text)


async def test_what_waits_and_what_is_written_survive_the_worker(tmp_path):
    command = builders.scripted("--max-sequences", 1, "--fault", "die", "--after", 3, "--once", tmp_path / "begun")
    async with dispatching(replicas=1, command=command, workers=FAST) as dispatch:
        flights = [send(dispatch, a_submit()) for _ in range(20)]
        answers = await asyncio.gather(*(answer(flight) for flight in flights))
    assert [tokens(deltas) for deltas in answers] == [SCRIPT * 2] * 20


async def test_a_worker_that_is_killed_is_replaced(caplog):
    async with dispatching(replicas=1, command=builders.scripted(), workers=FAST) as dispatch:
        os.kill(dispatch.ready("scripted").pid, signal.SIGKILL)
        await reborn(dispatch)
    assert "worker scripted-0 lost: it was killed by signal 9" in caplog.text


async def test_while_one_model_has_no_worker_the_others_go_on(start_scripted_worker):
    good = await start_scripted_worker()
    bad = await start_scripted_worker("--fault", "garbage")
    models = {
        "scripted": settings.Model(replicas=0, addresses=(good,)),
        "bad": settings.Model(replicas=0, addresses=(bad,)),
    }
    dispatch = Dispatch(settings.Settings(models=models, workers=FAST), Clock())
    for name in models:
        dispatch.serve(name, NO_TEXT)
    async with asyncio.timeout(builders.PATIENCE_S):
        await dispatch.until_ready()
        while dispatch.workers()[1].num_lives < 4:
            assert len(tokens(await answer(send(dispatch, a_submit())))) == 8
    await dispatch.close(drain_s=0)


async def test_nobody_who_could_not_be_reached_has_filled_a_place(caplog):
    model = settings.Model(replicas=0, addresses=(f"tcp:127.0.0.1:{free_port()}",))
    dispatch = Dispatch(settings.Settings(models={"away": model}, workers=FAST), Clock())
    dispatch.serve("away", NO_TEXT)
    await until(lambda: caplog.text.count("cannot be reached") >= 3)
    assert dispatch.workers()[0].num_lives == 0
    await dispatch.close(drain_s=0)


async def test_a_worker_of_another_version_is_refused_by_name(start_scripted_worker, caplog):
    address = await start_scripted_worker("--version", 99)
    model = settings.Model(replicas=0, addresses=(address,))
    dispatch = Dispatch(settings.Settings(models={"scripted": model}), Clock())
    dispatch.serve("scripted", NO_TEXT)
    await until(lambda: caplog.records)
    await dispatch.close(drain_s=0)
    assert f"broke the protocol: it speaks version 99, this gateway speaks {wire.VERSION}" in caplog.text


@pytest.mark.parametrize("fault", ["none", "silence"])
async def test_a_worker_may_be_heard_before_connecting_returns(start_scripted_worker, monkeypatch, caplog, fault):
    """Its first frames may be there in the very iteration in which the connection is made."""
    made = Channel.connection_made

    def slowly(channel: Channel, transport: asyncio.BaseTransport) -> None:
        made(channel, transport)
        time.sleep(0.1)

    monkeypatch.setattr(Channel, "connection_made", slowly)
    faults = [] if fault == "none" else ["--fault", fault, "--after", 1]
    limits = settings.Workers(silence_timeout_s=30.0 if fault == "none" else 0.3, max_failovers=0)
    address = await start_scripted_worker("--stats-s", 0.05, *faults)
    config = settings.Settings(models={"scripted": settings.Model(replicas=0, addresses=(address,))}, workers=limits)
    dispatch = Dispatch(config, Clock())
    dispatch.serve("scripted", NO_TEXT)
    flight = send(dispatch, a_submit())  # it waits in line when the worker joins
    async with asyncio.timeout(builders.PATIENCE_S):
        if fault == "none":
            assert len(tokens(await answer(flight))) == 8
        else:
            with pytest.raises(errors.WorkerLost):
                await answer(flight)
            await until(lambda: caplog.records)
            assert "said nothing for 0.3 s" in caplog.text
    await dispatch.close(drain_s=0)


async def test_a_worker_that_does_not_read_is_lost(start_scripted_worker, caplog):
    address = await start_scripted_worker("--num-blocks", 1_000_000)
    limits = settings.Workers(max_send_buffer_bytes=1_000_000, max_failovers=0)
    async with dispatching(address, workers=limits) as dispatch:
        os.kill(dispatch.ready("scripted").pid, signal.SIGSTOP)
        flights = []
        while dispatch.workers()[0].facts is not None:
            flights.append(send(dispatch, a_submit(num_prompt_tokens=50_000)))
        for flight in flights:
            with pytest.raises(errors.WorkerLost):
                await flight.deltas()
        await asyncio.sleep(0)
    assert "does not read" in caplog.text


async def test_addresses_are_tried_again_with_back_off(tmp_path, clock, caplog):
    address = f"unix:{tmp_path / 'nobody'}"
    limits = settings.Workers(restart_backoff_s=1.0, max_restart_backoff_s=5.0)
    config = settings.Settings(models={"far": settings.Model(replicas=0, addresses=(address,))}, workers=limits)
    dispatch = Dispatch(config, clock)
    dispatch.serve("far", NO_TEXT)
    waits = []
    for _ in range(6):
        await until(lambda: caplog.records and clock.waits())
        caplog.clear()
        waits += clock.waits()
        clock.advance(waits[-1])
    await dispatch.close(drain_s=0)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


async def test_a_worker_that_stayed_long_starts_again_from_the_shortest_wait(start_scripted_worker, clock, caplog):
    limits = settings.Workers(restart_backoff_s=1.0, max_restart_backoff_s=50.0, silence_timeout_s=1e6)
    waits = []
    address = await start_scripted_worker()
    async with dispatching(address, clock=clock, workers=limits) as dispatch:
        os.kill(dispatch.ready("scripted").pid, signal.SIGKILL)
        for _ in range(3):
            await until(lambda: caplog.records and min(clock.waits()) < 1e3)
            caplog.clear()
            waits.append(min(clock.waits()))
            clock.advance(waits[-1])
        await start_scripted_worker(listen=address)
        await until(lambda: caplog.records and min(clock.waits()) < 1e3)
        clock.advance(8.0)
        await until(lambda: dispatch.workers()[0].facts)
        clock.advance(51.0)
        caplog.clear()
        os.kill(dispatch.ready("scripted").pid, signal.SIGKILL)
        await until(lambda: caplog.records and min(clock.waits()) < 1e3)
        waits.append(min(clock.waits()))
    assert waits == [1.0, 2.0, 4.0, 1.0]


async def test_a_worker_on_another_host_is_reached_over_tcp(start_scripted_worker):
    async with dispatching(await start_scripted_worker(listen=f"tcp:127.0.0.1:{free_port()}")) as dispatch:
        assert len(tokens(await answer(send(dispatch, a_submit())))) == 8


async def test_last_words_of_a_worker_that_exits_are_heard(tmp_path):
    script = tmp_path / "hasty.py"
    script.write_text(HASTY)
    for _ in range(10):
        async with dispatching(replicas=1, command=(sys.executable, str(script)), workers=FAST) as dispatch:
            assert tokens(await answer(send(dispatch, a_submit()))) == [1, 2, 3]


READY = """
import os, signal, socket, sys
import msgspec
from policies import framing, settings, wire

listen = msgspec.json.decode(sys.argv[1], type=settings.WorkerSettings).listen
with socket.socket(socket.AF_UNIX) as server:
    server.bind(listen.removeprefix("unix:"))
    server.listen()
    gateway, _ = server.accept()
    gateway.sendall(framing.encode(wire.Hello(wire.VERSION, "brief")))
    gateway.sendall(framing.encode(wire.Ready("scripted", 100, 100, [0], 32, 10, 4, "cpu", "float32", os.getpid())))
    frames = framing.frames_to_worker()
"""
"""A worker that is greeted, and takes what it is told."""

HASTY = (
    READY
    + """
    while not (submits := [m for m in frames.feed(gateway.recv(65536)) if isinstance(m, wire.Submit)]):
        pass
    finish = wire.Finish("stop", 0, 0, 0.0, 0.0, 0.0)
    gateway.sendall(framing.encode(wire.StepOutput([wire.Delta(submits[0].request_id, 0, [1, 2, 3], finish=finish)])))
    os._exit(0)
"""
)


@pytest.mark.parametrize(("num_failures", "delay_s"), [(1, 0.5), (2, 1.0), (6, 16.0), (7, 30.0), (10**9, 30.0)])
def test_the_back_off_doubles_up_to_its_ceiling(num_failures, delay_s):
    assert workers.backoff_s(num_failures, settings.Workers()) == delay_s


async def test_a_start_that_takes_too_long_is_a_failed_start(caplog):
    limits = settings.Workers(start_timeout_s=0.05, restart_backoff_s=0.01)
    config = settings.Settings(models={"slow": settings.Model()}, workers=limits)
    dispatch = Dispatch(config, Clock(), Launcher((sys.executable, "-c", "import sys; sys.stdin.read()")))
    dispatch.serve("slow", NO_TEXT)
    await until(lambda: dispatch.workers()[0].num_lives == 3)
    await dispatch.close(drain_s=0)
    assert "worker slow-0 lost: it was not ready within 0.05 s" in caplog.text


async def test_a_model_that_cannot_be_loaded_is_not_tried_again():
    config = settings.Settings(models={"broken": settings.Model(replicas=2)}, workers=FAST)
    dispatch = Dispatch(config, Clock(), Launcher(builders.scripted("--exit-at-start", 2)))
    dispatch.serve("broken", NO_TEXT)
    with pytest.raises(NothingToServe):
        async with asyncio.timeout(builders.PATIENCE_S):
            await dispatch.until_ready()
    assert [worker.num_lives for worker in dispatch.workers()] == [1, 1]
    with pytest.raises(errors.ModelNotFound):
        dispatch.ready("broken")
    await dispatch.close(drain_s=0)


async def test_a_worker_that_is_closed_finishes_what_it_holds():
    command = builders.scripted("--step-s", 0.005)
    async with dispatching(replicas=1, command=command) as dispatch:
        flight = send(dispatch, a_submit(max_tokens=40))
        reading = asyncio.create_task(answer(flight))
        await dispatch.close(drain_s=builders.PATIENCE_S)
        assert len(tokens(await reading)) == 40


async def test_a_worker_that_hangs_on_its_way_out_is_ended(tmp_path):
    script = tmp_path / "lingering.py"
    script.write_text(LINGERING)
    async with dispatching(replicas=1, command=(sys.executable, str(script))) as dispatch:
        process = dispatch.workers()[0]._process
        await dispatch.close(drain_s=0.2)
        assert process.returncode == -signal.SIGKILL


LINGERING = (
    READY
    + """
    while not any(isinstance(message, wire.Drain) for message in frames.feed(gateway.recv(65536))):
        pass
    gateway.close()
    signal.pause()
"""
)


async def test_a_worker_sees_that_its_gateway_is_gone():
    async with dispatching(replicas=1, command=builders.scripted()) as dispatch:
        process = dispatch.workers()[0]._process
        process.stdin.close()
        assert await process.wait() == 0
