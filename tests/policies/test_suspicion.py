"""Requests that end workers end alone, and take nobody with them for good."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from policies.suspicion import ALONE_AT, NUM_AHEAD, Suspicion, may_join

MAX_UNHEARD = 8
"""Tokens that a worker may have computed when it is lost, and that nobody heard of."""


def test_only_losses_without_getting_ahead_add_up():
    suspicion = Suspicion()
    assert suspicion.standing(0) == "free"
    suspicion = suspicion.after_loss(10, 1)
    assert suspicion.standing(10) == "free"
    again = suspicion.after_loss(10 + NUM_AHEAD - 1, 1)
    assert again.standing(10 + NUM_AHEAD - 1) == "apart"
    assert again.standing(10 + 2 * NUM_AHEAD - 1) == "free", "it got ahead"
    assert suspicion.after_loss(10 + NUM_AHEAD, 1).num_losses == 1
    assert again.after_loss(50, 1).standing(50) == "alone"
    assert not again.after_loss(50, 1).is_proven
    assert again.after_loss(50, 1).after_loss(50, 1).is_proven


def test_each_of_several_sequences_has_to_get_ahead():
    suspicion = Suspicion().after_loss(10, 3).after_loss(10, 3)
    assert suspicion.standing(10 + 3 * NUM_AHEAD - 1) == "apart"
    assert suspicion.standing(10 + 3 * NUM_AHEAD) == "free"


def test_who_may_join_whom():
    assert may_join("free", 5, ["apart"])
    assert may_join("apart", 5, [])
    assert not may_join("apart", 5, ["apart"])
    assert may_join("alone", 0, [])
    assert not may_join("alone", 1, [])
    assert not any(may_join(standing, 1, ["alone"]) for standing in ("free", "apart", "alone"))


@dataclass(eq=False)
class Request:
    num_wanted: int
    deadly_at: int | None
    """With this many tokens it ends the worker that computes it."""
    num_known: int = 0
    """Tokens that were heard of."""
    num_computed: int = 0
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_ended: int = 0
    """Workers that it ended."""

    @property
    def standing(self):
        return self.suspicion.standing(self.num_known)


def a_request(chance: random.Random, is_deadly: bool) -> Request:
    num_wanted = chance.randint(1, 200)
    return Request(num_wanted, chance.choice([0, chance.randrange(num_wanted)]) if is_deadly else None)


@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 4),
    num_innocent=st.integers(0, 24),
    num_deadly=st.integers(0, 6),
    max_batch=st.integers(1, 12),
)
def test_every_innocent_completes_and_every_killer_ends_alone(seed, num_workers, num_innocent, num_deadly, max_batch):
    chance = random.Random(seed)
    innocent = [a_request(chance, is_deadly=False) for _ in range(num_innocent)]
    deadly = [a_request(chance, is_deadly=True) for _ in range(num_deadly)]
    coming, waiting = [*innocent, *deadly], []
    chance.shuffle(coming)
    workers: list[list[Request]] = [[] for _ in range(num_workers)]
    ended: list[Request] = []
    while coming or waiting or any(workers):
        if coming and chance.random() < 0.5:
            waiting.append(coming.pop())
        send(chance, waiting, workers, max_batch)
        there = chance.choice(workers)
        killers = [request for request in there if request.deadly_at == request.num_computed]
        if killers:
            killers[0].num_ended += 1
            for request in there:
                request.suspicion = request.suspicion.after_loss(request.num_known, 1)
                request.num_computed = request.num_known
                if request.suspicion.is_proven:
                    assert there == [request]
                    ended.append(request)
                else:
                    waiting.append(request)
            there.clear()
        else:
            step(chance, there)
    assert all(request.num_known == request.num_wanted for request in innocent)
    assert sorted(map(id, ended)) == sorted(map(id, deadly))
    assert all(request.num_ended <= ALONE_AT + 1 for request in deadly)


def send(chance: random.Random, waiting: list[Request], workers: list[list[Request]], max_batch: int) -> None:
    """Whoever must be alone goes first; else anybody, to anywhere with room."""
    chance.shuffle(waiting)
    waiting.sort(key=lambda request: request.standing != "alone")
    for request in list(waiting):
        able = [
            there
            for there in workers
            if len(there) < max_batch
            and may_join(request.standing, len(there), [each.standing for each in there if each.standing != "free"])
        ]
        if able:
            waiting.remove(request)
            chance.choice(able).append(request)


def step(chance: random.Random, there: list[Request]) -> None:
    """Each computes a token, or several that were guessed; of the last ones nobody has heard yet."""
    for request in list(there):
        most = request.num_wanted if request.deadly_at is None else request.deadly_at
        request.num_computed = min(most, request.num_computed + chance.randint(1, 4))
        request.num_known = max(request.num_known, request.num_computed - chance.randint(0, MAX_UNHEARD))
        if request.num_computed == request.num_wanted:
            request.num_known = request.num_wanted
            there.remove(request)
