"""A worker counts the devices of its machine, takes its own of them, and leaves others on them their part."""

from __future__ import annotations

import pytest
import torch

from gateway.workers import child_of, claims_of
from policies import settings
from policies.devices import ALONE, Turn
from policies.engine import Speculation
from worker.devices import device_of, own_turn, placed
from worker.kv_cache import budget_bytes
from worker.models import Layout, ModelError

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    """Of four devices, 80 GiB free on each but the last; says which one kernels go to."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((10 if device.index == 3 else 80) * GIB, 80 * GIB))
    return current


def model(replicas: int = 1, **engine) -> settings.Model:
    return settings.Model(replicas=replicas, engine=settings.Engine(**engine))


def told(models: dict[str, settings.Model], name: str, replica: int = 0) -> settings.WorkerSettings:
    return child_of(name, settings.Settings(models=models), replica, "unix:/nowhere", 0)


def test_each_replica_computes_on_a_device_of_its_own(machine):
    models = {"m": model(4)}
    engines = [placed(told(models, "m", replica)).engine for replica in range(4)]
    assert [device_of(engine, Layout(), 0) for engine in engines] == [torch.device("cuda", at) for at in range(4)]
    assert machine == [0, 1, 2, 3]
    assert {engine.kv_memory_share for engine in engines} == {0.9}


def test_attention_that_is_planned_anew_for_each_length_is_not_used_on_devices(machine):
    torch.backends.cuda.enable_cudnn_sdp(True)
    device_of(settings.Engine(device="cpu"), Layout(), 0)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    device_of(settings.Engine(), Layout(), 0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_ranks_of_replicas_tile_the_devices(machine):
    models = {"m": model(2, tensor_parallel=2)}
    for replica in range(2):
        engine = placed(told(models, "m", replica)).engine
        devices = [device_of(engine, Layout(2, 1), rank).index for rank in range(2)]
        assert devices == [2 * replica, 2 * replica + 1]


def test_workers_on_one_device_divide_its_memory(machine):
    models = {
        "wide": model(tensor_parallel=4),
        "small": model(),
        "other": model(speculation=Speculation(draft_model="d")),
    }
    assert placed(told(models, "wide")).engine.kv_memory_share == 0.45
    small = placed(told(models, "small")).engine
    assert small.devices == (0,)
    assert budget_bytes(small, device_of(small, Layout(), 0)) == int(0.45 * 80 * GIB)
    other = placed(told(models, "other")).engine
    assert other.devices == (1,)
    assert other.kv_memory_share == 0.3  # its draft model is a third
    own = {**models, "small": model(kv_memory_share=0.5)}
    assert placed(told(own, "small")).engine.kv_memory_share == 0.5


def test_memory_is_that_of_the_own_device_and_a_rank_does_not_divide_it(machine):
    engine = placed(told({"m": model(devices=(3,))}, "m")).engine
    assert budget_bytes(engine, device_of(engine, Layout(), 0), num_ranks=4) == int(0.9 * 10 * GIB)


def test_too_few_devices_are_told_with_the_numbers(machine):
    reason = r"m takes 6 CUDA devices, .* \(2\) for each of its replicas \(3\), but torch finds 4 here"
    with pytest.raises(ModelError, match=reason):
        placed(told({"m": model(3, tensor_parallel=2)}, "m"))
    with pytest.raises(ModelError, match=r"names CUDA device 7 for m, but torch finds 4 here"):
        placed(told({"m": model(2, devices=(0, 7))}, "m"))
    alone = by_itself(settings.Engine(tensor_parallel=2, devices=(1,)))
    with pytest.raises(ModelError, match=r"pipeline_parallel is 2, but 1 CUDA devices are named in engine\.devices"):
        device_of(placed(alone).engine, Layout(2), 0)


def test_a_worker_by_itself_takes_the_first_devices_or_those_that_it_is_told(machine):
    assert placed(by_itself(settings.Engine(tensor_parallel=2))).engine.devices == (0, 1)
    assert placed(by_itself(settings.Engine(devices=(2,)))).engine.devices == (2,)


def test_on_the_cpu_nothing_is_dealt_out(monkeypatch):
    for engine in (settings.Engine(device="cpu"), settings.Engine()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cpu=engine.device == "cpu": cpu)
        assert placed(by_itself(engine)).engine == engine
        assert device_of(engine, Layout(), 0) == torch.device("cpu")


def test_who_computes_on_the_cpu_takes_turns_with_those_who_do_too(monkeypatch):
    models = {
        "far": settings.Model(replicas=0, addresses=("unix:/there",)),
        "chat": model(),
        "small": model(2, device="cpu", devices=(9,)),
        "seldom": settings.Model(load_at_start=False),
        "wide": model(tensor_parallel=2, device="cpu"),
        "named": model(devices=(0,)),
    }
    assert {claim.devices for claim in claims_of(models) if claim.device == "cpu"} == {()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    everybody = [("chat", 0), ("small", 0), ("small", 1), ("seldom", 0), ("wide", 0)]
    assert [own_turn(told(models, *worker)).number for worker in everybody] == [0, 1, 2, 3, 4]
    assert own_turn(told(models, "small", 1)) == Turn(2, 1, 2)
    assert own_turn(told(models, "wide"), 1) == Turn(5, 4, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert own_turn(told(models, "small", 1)) == Turn(1, 0, 2)
    assert own_turn(told(models, "wide"), 1) == Turn(3, 2, 2)
    assert own_turn(told(models, "seldom")) == Turn(1, 1, 1)


def test_a_worker_by_itself_is_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_turn(by_itself(settings.Engine())) == ALONE
    assert own_turn(by_itself(settings.Engine(tensor_parallel=2)), 1) == Turn(1, 0, 2)


def test_devices_that_are_named_are_not_done_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for engine, named in (
        (settings.Engine(devices=(0,)), "devices names some"),
        (settings.Engine(device="cuda"), "is cuda"),
    ):
        with pytest.raises(ModelError, match=f"{named}, but torch finds no CUDA device here"):
            device_of(placed(by_itself(engine)).engine, Layout(), 0)


def by_itself(engine: settings.Engine) -> settings.WorkerSettings:
    return settings.WorkerSettings(name="m@unix", model="m", source="m", listen="unix:/nowhere", engine=engine)
