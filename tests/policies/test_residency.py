"""Who leaves memory for a model that is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.residency import NoRoom, Resident, room_for


def resident(name: str, num_bytes: int, used_at: float = 0.0, is_idle: bool = True, is_pinned: bool = False):
    return Resident(name, num_bytes, used_at, is_idle, is_pinned)


def test_what_fits_sends_nobody_away():
    assert room_for(4, [resident("a", 6)], 10) == []


def test_the_one_unused_for_longest_leaves_first():
    assert room_for(4, [resident("a", 4, used_at=2), resident("b", 4, used_at=1)], 10) == ["b"]


def test_a_small_one_stays_where_a_large_one_had_to_go_anyway():
    assert room_for(8, [resident("small", 1, used_at=1), resident("large", 9, used_at=2)], 10) == ["large"]


def test_who_answers_or_is_pinned_stays_and_the_refusal_has_numbers():
    gib = 1 << 30
    answer = room_for(8 * gib, [resident("a", 3 * gib, is_idle=False), resident("b", gib, is_pinned=True)], 10 * gib)
    assert answer == NoRoom(8 * gib, 10 * gib, 3 * gib, gib)
    assert not answer.is_lasting
    assert str(answer) == (
        "it needs 8.00 GiB of 10.00 GiB and 1.00 GiB of it are held by models that are pinned "
        "and 3.00 GiB of it are held by models that are in use"
    )


def test_what_never_fits_is_told_apart_from_what_may_fit_later():
    assert room_for(11, [], 10).is_lasting
    assert room_for(8, [resident("a", 4, is_pinned=True)], 10).is_lasting
    assert not room_for(8, [resident("a", 4, is_idle=False)], 10).is_lasting


residents = st.lists(st.tuples(st.integers(0, 50), st.floats(0, 100), st.booleans(), st.booleans()), max_size=8).map(
    lambda rows: [resident(str(number), *row) for number, row in enumerate(rows)]
)


@given(st.integers(0, 100), residents, st.integers(0, 150))
def test_whoever_leaves_makes_room_and_is_needed_for_it(needed, there, budget):
    answer = room_for(needed, there, budget)
    by_name = {one.name: one for one in there}
    may_leave = {one.name for one in there if one.is_idle and not one.is_pinned}
    if isinstance(answer, NoRoom):
        staying = sum(one.num_bytes for one in there if one.name not in may_leave)
        assert staying + needed > budget
        return
    assert set(answer) <= may_leave
    left = sum(one.num_bytes for one in there) - sum(by_name[name].num_bytes for name in answer)
    assert left + needed <= budget
    for name in answer:
        assert left + by_name[name].num_bytes + needed > budget
