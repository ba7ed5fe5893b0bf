"""What reading the ledger again finds, on both databases: whatever somebody did to it, by name; and nothing else."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from gateway import store
from gateway.cli import main
from gateway.ledger import Entry, verify
from gateway.ledger.chains import content_of
from gateway.ledger.closing import DAY_S, name_of
from gateway.ledger.follow import Follower
from gateway.ledger.verify import Verdict
from gateway.store import Store
from tests.builders import an_entry
from tests.gateway.test_ledger_closing import FIRST, begun, close_until, write

NUM_ROWS = 30
"""Ten a day, for three days; two are closed."""


@pytest.fixture
async def rows(rooms, monkeypatch) -> list[Entry]:
    monkeypatch.setattr(verify, "AT_ONCE", 4)
    chain = await begun(rooms)
    others = {"metadata": '{"team":"a"}', "end_user": "somebody", "ttft_ms": None, "queue_ms": 3.0}
    rows = [chain.extend(an_entry(**others), FIRST * DAY_S + DAY_S * number // 10) for number in range(NUM_ROWS)]
    await write(rooms, *rows)
    await close_until(rooms, FIRST + 2)
    return rows


async def do(rooms: Store, statement: sa.Executable) -> None:
    async with rooms.engine.begin() as connection:
        await connection.execute(statement)


def of_position(position: int) -> sa.ColumnElement[bool]:
    return store.ledger.c.position == position


def named(verdict: Verdict) -> list[tuple[str, str | None, int | None]]:
    """Kind, day and position of each finding."""
    return [(finding.kind, finding.day, finding.position) for finding in verdict.findings]


async def test_nothing_is_found_where_nothing_was_done(rooms, rows):
    told = []
    verdict = await verify.verify(rooms, told=lambda done, total: told.append((done, total)))
    assert verdict.findings == []
    assert (verdict.num_rows, verdict.num_chains, verdict.num_before_chains) == (NUM_ROWS, 1, 0)
    assert [(day.day, day.num_rows) for day in verdict.days] == [(name_of(FIRST), 10), (name_of(FIRST + 1), 10)]
    assert told[-1] == (NUM_ROWS, NUM_ROWS)
    assert told == sorted(told)


async def test_a_row_that_was_changed_is_named_whatever_was_changed_in_it(rooms, rows):
    others = {"finish_reason": "length", "link": b"x" * 32, "cache": "hit", "ttft_ms": 2.0}
    for column in [name for name in Entry.__struct_fields__ if name not in ("chain", "position")]:
        before = getattr(rows[6], column)
        after = others.get(column, before + 1 if isinstance(before, int | float) else f"{before}?")
        await do(rooms, sa.update(store.ledger).where(of_position(7)).values({column: after}))
        verdict = await verify.verify(rooms)
        assert named(verdict)[:1] == [("changed", name_of(FIRST), 7)], column
        assert verdict.findings[0].request_id == (after if column == "request_id" else rows[6].request_id)
        assert verdict.num_findings == (2 if column == "link" else 1), column
        await do(rooms, sa.update(store.ledger).where(of_position(7)).values({column: before}))
    assert (await verify.verify(rooms)).findings == []


@pytest.mark.parametrize(("position", "day"), [(1, FIRST), (7, FIRST), (10, FIRST), (20, FIRST + 1), (25, None)])
async def test_a_row_that_is_missing_is_named_by_its_place(rooms, rows, position, day):
    await do(rooms, sa.delete(store.ledger).where(of_position(position)))
    verdict = await verify.verify(rooms)
    assert named(verdict) == [("missing", None if day is None else name_of(day), position)]
    assert ("spool" in verdict.findings[0].what) == (day is None)


async def test_rows_that_are_missing_together_are_one_finding(rooms, rows):
    await do(rooms, sa.delete(store.ledger).where(store.ledger.c.position.between(3, 9)))
    (finding,) = (await verify.verify(rooms)).findings
    assert "positions 3 to 9" in finding.what


async def test_a_row_that_was_put_in_is_named(rooms, rows):
    await write(rooms, msgspec.structs.replace(rows[6], request_id="req_forged"))
    # Which of the two is the right one is for people to say; the other has been found first, or not.
    found = (await verify.verify(rooms)).findings
    assert {finding.position for finding in found} == {7}
    assert found[-1].kind == "extra"
    await do(rooms, sa.insert(store.ledger).values(msgspec.structs.asdict(an_entry(chain=7, position=1))))
    assert any("chain 7 was never opened" in finding.what for finding in (await verify.verify(rooms)).findings)


@pytest.mark.parametrize("values", [{"last_link": b"x" * 32}, {"last_position": 9}, {"first_position": 2}])
async def test_a_closing_that_was_changed_does_not_fit_its_digest(rooms, rows, values):
    await do(rooms, sa.update(store.ledger_closings).where(store.ledger_closings.c.day == FIRST).values(values))
    assert named(await verify.verify(rooms))[0] == ("digest", name_of(FIRST), None)


async def test_a_digest_that_was_changed_or_a_day_that_is_missing_is_named(rooms, rows):
    await do(rooms, sa.update(store.ledger_days).where(store.ledger_days.c.day == FIRST).values(digest=b"x" * 32))
    # The day itself, and the next one, whose digest is over it.
    assert named(await verify.verify(rooms)) == [("digest", name_of(FIRST), None), ("digest", name_of(FIRST + 1), None)]
    await do(rooms, sa.delete(store.ledger_days).where(store.ledger_days.c.day == FIRST))
    assert ("digest", name_of(FIRST + 1), None) in named(await verify.verify(rooms))


async def test_a_row_that_was_changed_with_its_link_shows_in_the_row_after_it(rooms, rows):
    changed = msgspec.structs.replace(rows[6], cost_micros=1, link=None)
    link = verify.link_of(rows[5].link, content_of(changed))
    await do(rooms, sa.update(store.ledger).where(of_position(7)).values(cost_micros=1, link=link))
    assert named(await verify.verify(rooms)) == [("changed", name_of(FIRST), 8)]


async def test_a_period_is_read_by_itself(rooms, rows):
    await do(rooms, sa.update(store.ledger).where(of_position(15)).values(cost_micros=1))
    assert named(await verify.verify(rooms, FIRST, FIRST + 1)) == []
    of_second = await verify.verify(rooms, FIRST + 1, FIRST + 2)
    assert named(of_second) == [("changed", name_of(FIRST + 1), 15)]
    assert of_second.num_rows == 10
    after = await verify.verify(rooms, FIRST + 2)
    assert (after.num_rows, after.findings) == (10, [])


async def test_a_request_that_two_have_settled_is_in_order_as_long_as_its_row_is_there(rooms):
    first, second = await begun(rooms), await begun(rooms)
    twice = an_entry()
    await write(rooms, first.extend(twice, FIRST * DAY_S))
    await write(rooms, *(second.extend(entry, FIRST * DAY_S) for entry in (an_entry(), twice, an_entry())))
    assert (await verify.verify(rooms)).findings == []
    await close_until(rooms, FIRST + 1)
    verdict = await verify.verify(rooms)
    assert (verdict.findings, verdict.num_rows) == ([], 3)
    await do(rooms, sa.update(store.ledger_repeats).values(content=b"something else"))
    assert ("changed", name_of(FIRST), 3) in named(await verify.verify(rooms))
    await do(rooms, sa.delete(store.ledger).where(store.ledger.c.request_id == twice.request_id))
    found = (await verify.verify(rooms)).findings
    assert [finding.position for finding in found if finding.kind == "missing"] == [1, 2]


async def test_rows_from_before_there_were_chains_are_counted(rooms, rows):
    await write(rooms, an_entry(), an_entry())
    verdict = await verify.verify(rooms)
    assert (verdict.num_before_chains, verdict.findings) == (2, [])


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_done_to_one_row_is_found_and_the_others_are_not_blamed(rooms, rows, seed):
    chance = random.Random(seed)
    for position in chance.sample(range(1, NUM_ROWS), 3):
        await do(rooms, sa.update(store.ledger).where(of_position(position)).values(num_completion_tokens=35))
        found = {finding.position for finding in (await verify.verify(rooms)).findings}
        assert found == {position}, f"seed {seed}"
        await do(rooms, sa.update(store.ledger).where(of_position(position)).values(num_completion_tokens=34))


# The commands


@pytest.fixture
def call(rooms, store_settings, monkeypatch):
    """``penstock ledger ...`` beside a gateway that has the store open: exit status, standard output and error."""
    monkeypatch.setenv("PENSTOCK_STORE__URL", store_settings.url)
    monkeypatch.setenv("PENSTOCK_STORE__DATA_DIR", store_settings.data_dir)

    async def call(*arguments: str) -> tuple[int, str, str]:
        result = await asyncio.to_thread(CliRunner().invoke, main, ["ledger", *arguments])
        return result.exit_code, result.stdout, result.stderr

    return call


async def test_the_command_says_that_all_is_well_or_what_is_not(rooms, rows, call):
    status, said, _ = await call("verify")
    assert (status, said.splitlines()[0]) == (
        0,
        "Rows read: 30, chains: 1, closed days: 2; all is as it was written.",
    )
    await do(rooms, sa.update(store.ledger).where(of_position(7)).values(cost_micros=1))
    status, said, _ = await call("verify")
    assert status == 1
    assert said.startswith(f"changed: {rows[6].request_id} is not the row that was written")
    status, said, _ = await call("verify", "--json", "--to", "2024-10-05")
    verdict = msgspec.json.decode(said, type=Verdict)
    assert (status, verdict.num_findings, verdict.findings[0].request_id) == (1, 1, rows[6].request_id)
    assert [day.day for day in verdict.days] == ["2024-10-04"]


async def test_days_are_closed_by_command(rows, call):
    status, said, _ = await call("close", "--day", "2024-10-07")
    assert (status, [line.split(",")[0] for line in said.splitlines()]) == (
        0,
        ["2024-10-06: 10 rows", "2024-10-07: 0 rows"],
    )
    assert "Nothing to do" in (await call("close", "--day", "2024-10-07"))[1]
    (day,) = msgspec.json.decode((await call("close", "--json", "--day", "2024-10-08"))[1])
    assert (day["day"], day["num_rows"], len(day["digest"])) == ("2024-10-08", 0, 64)


async def test_rows_that_are_lost_are_given_up_and_those_behind_them_go_on_and_stay_a_finding(rooms, rows, call):
    await close_until(rooms, FIRST + 3)
    chain = await begun(rooms)
    placed = [chain.extend(an_entry(), (FIRST + 3) * DAY_S) for _ in range(5)]
    await write(rooms, placed[0], placed[4])
    follower = Follower(rooms, "usage")
    assert len((await follower.next(100)).entries) == NUM_ROWS + 1
    lost = ("give-up", "--chain", str(chain.number), "--from-position", "2", "--reason", "the disk burned")
    status, said, _ = await call(*lost, "--to-position", "4")
    assert (status, said) == (0, f"Given up: positions 2 to 4 of chain {chain.number}.\n")
    assert (await follower.next(100)).entries[-1] == placed[4]
    assert [day.num_rows for day in await close_until(rooms, FIRST + 4)] == [2]
    found = (await verify.verify(rooms)).findings
    assert [(finding.kind, finding.position, finding.request_id) for finding in found] == [
        ("missing", position, None) for position in (2, 3, 4)
    ]
    async with rooms.engine.connect() as connection:
        (line,) = (await connection.execute(sa.select(store.audit_log))).all()
    assert (line.action, msgspec.json.decode(line.after)["reason"]) == ("ledger.given_up", "the disk burned")
    assert f"position 2 of chain {chain.number} is not missing" in (await call(*lost))[2]


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [
        (("--from-position", "7"), "position 7 of chain {chain} is not missing"),
        (("--from-position", "31"), "no row behind position 31"),
        (("--from-position", "9", "--to-position", "8"), "are no places"),
        (("--from-position", "0"), "0 is not in the range"),
    ],
)
async def test_rows_that_are_there_or_may_still_come_are_not_given_up(rooms, rows, call, positions, sentence):
    status, _, said = await call("give-up", "--chain", str(rows[0].chain), *positions, "--reason", "r")
    assert status == 2
    assert sentence.format(chain=rows[0].chain) in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("close", "--day", "2999-01-01"), "2999-01-01 is not over yet"),
        (("close", "--day", "soon"), "'soon' does not match the format"),
        (("close",), "Missing option '--day'"),
        (("verify", "--from", "2024-10-05", "--to", "2024-10-05"), "the period ends at 2024-10-05, before it begins"),
        (("verify", "--from", "2024-13-05"), "does not match the format"),
    ],
)
async def test_days_that_cannot_be_are_refused(call, arguments, sentence):
    status, _, said = await call(*arguments)
    assert status == 2
    assert sentence in said


async def test_where_there_is_no_store_or_an_older_one_the_command_says_so(tmp_path, call, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STORE__URL", "")
    monkeypatch.setenv("PENSTOCK_STORE__DATA_DIR", str(tmp_path / "empty"))
    assert "there is no store in" in (await call("verify"))[2]
    assert not (tmp_path / "empty").exists()


async def test_an_older_store_is_left_alone(rooms, call):
    await do(rooms, sa.text("UPDATE alembic_version SET version_num = '0004'"))
    status, _, said = await call("verify")
    assert (status, said) == (
        2,
        "penstock: the store is an older Penstock's; `penstock migrate` brings it up to date\n",
    )


async def test_what_says_who_answered_is_part_of_a_row_and_its_lack_is_not(rooms, rows):
    assert msgspec.msgpack.decode(content_of(rows[0])) == [*msgspec.structs.astuple(rows[0])[:-3], None]
    await do(rooms, sa.update(store.ledger).where(of_position(7)).values(upstream="somebody"))
    assert named(await verify.verify(rooms)) == [("changed", name_of(FIRST), 7)]
