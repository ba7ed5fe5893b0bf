"""Workers of a machine deal out its devices among themselves, and all come to the same."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.devices import ALONE, Claim, Turn, dealt, devices_of, fault_of, turn_of


def claims(model: str, num_replicas: int, num_ranks: int = 1, devices: tuple[int, ...] = ()) -> list[Claim]:
    return [
        Claim(model=model, replica=at, num_ranks=num_ranks, devices=devices_of(devices, at, num_ranks))
        for at in range(num_replicas)
    ]


def test_each_replica_has_a_device_of_its_own():
    assert dealt(claims("m", 4), 4) == [(0,), (1,), (2,), (3,)]


def test_ranks_times_replicas_tile_the_devices():
    assert dealt(claims("m", 2, 4), 8) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_models_share_what_is_there_when_it_is_not_enough_for_all():
    assert dealt([*claims("large", 1, 2), *claims("small", 1), *claims("other", 1)], 3) == [(0, 1), (2,), (0,)]


def test_what_was_named_is_kept_and_others_get_out_of_its_way():
    assert dealt([*claims("free", 2), *claims("named", 1, 1, (0,))], 3) == [(1,), (2,), (0,)]


def test_replicas_share_what_was_named_twice():
    assert dealt(claims("m", 2, 1, (1, 1)), 2) == [(1,), (1,)]


def test_two_of_a_model_are_apart_even_where_others_crowd_one_device():
    crowd = [*claims("a", 1, 1, (0,)), *claims("b", 1, 1, (0,)), *claims("c", 1, 1, (0,))]
    assert dealt([*crowd, *claims("m", 2)], 2)[-2:] == [(1,), (0,)]


asked = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=5)


@given(asked, st.integers(6, 9))
def test_no_device_has_a_model_twice_and_none_is_idle_while_another_is_shared(models, num_devices):
    made = [claim for name, (replicas, ranks) in enumerate(models) for claim in claims(str(name), replicas, ranks)]
    found = dealt(made, num_devices)
    assert all(len(devices) == claim.num_ranks for claim, devices in zip(made, found, strict=True))
    pairs = Counter((claim.model, device) for claim, devices in zip(made, found, strict=True) for device in devices)
    assert max(pairs.values()) == 1
    load = Counter(device for devices in found for device in devices)
    assert set(load) <= set(range(num_devices))
    if sum(load.values()) <= num_devices:
        assert max(load.values()) == 1


def test_turns_go_through_all_ranks_of_all_workers_and_tell_a_model_its_own():
    line = [*claims("a", 1), *claims("b", 2, 2), *claims("c", 1)]
    ranks = [("a", 0, 0), ("b", 0, 0), ("b", 0, 1), ("b", 1, 0), ("b", 1, 1), ("c", 0, 0)]
    of_b = [Turn(number, 1, 4) for number in range(1, 5)]
    assert [turn_of(line, *rank) for rank in ranks] == [Turn(0, 0, 1), *of_b, Turn(5, 5, 1)]
    assert turn_of(claims("alone", 1), "alone", 0, 0) == ALONE


def test_names_that_are_too_few_are_told_with_the_numbers():
    assert fault_of((), 3, 2) is None
    assert fault_of((0, 1, 2, 3), 2, 2) is None
    assert fault_of((0, 0), 2, 1) is None
    assert "2 replicas of 2 ranks take 4 CUDA devices, but 3 are named" in fault_of((0, 1, 2), 2, 2)
    assert "replica 1 has device 2 2 times" in fault_of((0, 1, 2, 2), 2, 2)
