"""Which device a worker computes on, or one rank of its model, and how much of it becomes KV; on the CPU, whose turn it
is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import torch

from policies import settings
from policies.devices import Claim, Turn, dealt, devices_of, turn_of
from policies.engine import KV_MEMORY_SHARES
from worker.models import Layout, ModelError


def placed(told: settings.WorkerSettings) -> settings.WorkerSettings:
    """With the devices of its own ranks named, and the share of their memory that leaves the other workers on them
    theirs. Raises ModelError where there are too few.
    """
    engine = told.engine
    if engine.device == "cpu" or not torch.cuda.is_available():
        return told
    num_devices = torch.cuda.device_count()
    claims = [claim for claim in _claims_of(told) if claim.device != "cpu"]
    _refuse(claims, told.model, num_devices)
    everyone = dealt(claims, num_devices)
    own = everyone[[(claim.model, claim.replica) for claim in claims].index((told.model, told.replica))]
    num_there = Counter(device for devices in everyone for device in devices)
    # A draft model's weights come after the pool, and it has a pool, too.
    num_sharing = max(num_there[device] for device in own) + bool(engine.speculation.draft_model)
    share = engine.kv_memory_share or KV_MEMORY_SHARES["cuda"] / num_sharing
    return msgspec.structs.replace(told, engine=msgspec.structs.replace(engine, devices=own, kv_memory_share=share))


def own_turn(told: settings.WorkerSettings, rank: int = 0) -> Turn:
    """Of a rank of this worker, among all that compute on the CPU here, or among all that do not."""
    claims = _claims_of(told)
    on_cpu = {claim.model: _is_on_cpu(claim.device, claim.devices) for claim in claims}
    beside = [claim for claim in claims if on_cpu[claim.model] == on_cpu[told.model]]
    return turn_of(beside, told.model, told.replica, rank)


def _claims_of(told: settings.WorkerSettings) -> tuple[Claim, ...]:
    """Of all whom it knows of: by itself, its own."""
    engine = told.engine
    num_ranks = engine.tensor_parallel * engine.pipeline_parallel
    devices = devices_of(engine.devices, 0, num_ranks)
    alone = Claim(model=told.model, replica=told.replica, num_ranks=num_ranks, device=engine.device, devices=devices)
    return told.claims or (alone,)


def _is_on_cpu(device: str, devices: tuple[int, ...]) -> bool:
    """Whoever was told of CUDA devices does not go on without."""
    return device == "cpu" or (device == "auto" and not devices and not torch.cuda.is_available())


def _refuse(claims: Sequence[Claim], model: str, num_devices: int) -> None:
    own = [claim for claim in claims if claim.model == model]
    unknown = [device for claim in own for device in claim.devices if device >= num_devices]
    if unknown:
        raise ModelError(
            f"engine.devices names CUDA device {unknown[0]} for {model}, but torch finds {num_devices} here, counted"
            " from 0"
        )
    needed = sum(claim.num_ranks for claim in own if not claim.devices)
    if needed > num_devices:
        raise ModelError(
            f"{model} takes {needed} CUDA devices, engine.tensor_parallel times engine.pipeline_parallel"
            f" ({own[0].num_ranks}) for each of its replicas ({len(own)}), but torch finds {num_devices} here"
            " (replicas share those that engine.devices names several times)"
        )


def device_of(engine: settings.Engine, layout: Layout, rank: int) -> torch.device:
    """From now on also the one that kernels are launched on. Raises ModelError."""
    if _is_on_cpu(engine.device, engine.devices):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        asked = "engine.devices names some" if engine.devices else "engine.device is cuda"
        raise ModelError(f"{asked}, but torch finds no CUDA device here")
    devices = engine.devices or range(torch.cuda.device_count())
    if layout.num_ranks > len(devices):
        there = "are named in engine.devices" if engine.devices else "are here, as torch finds"
        raise ModelError(
            f"engine.tensor_parallel times engine.pipeline_parallel is {layout.num_ranks}, but {len(devices)} CUDA"
            f" devices {there}"
        )
    torch.cuda.set_device(devices[rank])
    # torch prefers cuDNN's attention on Hopper and on Blackwell's large devices, but plans it anew for each length, in
    # tens of milliseconds, and keeps every plan: drafts by an EAGLE head and batches for an encoder have any length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", devices[rank])
