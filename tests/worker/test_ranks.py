"""Which rank is named when some have ended, and when."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

import pytest

from tests.worker.peer import PATIENCE_S
from worker.parallel import ranks as module
from worker.parallel.control import Loaded, Meet
from worker.parallel.duty import PARTED
from worker.parallel.ranks import NUM_LOOKS, RankEnded, Ranks, Standing

RANK = """
import os, socket, sys
from worker.parallel.control import Control, Loaded
control = Control(socket.socket(fileno=int(sys.argv[1])))
control.tell(Loaded())
if (told := control.hear()) is not None:
    os._exit(told.port)
"""
"""One that ends as it is told, or is killed."""
SILENT = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"


@pytest.fixture
def two(monkeypatch):
    """Ranks 1 and 2."""
    monkeypatch.setattr(module, "LAST_WORDS_S", PATIENCE_S)
    ranks = Ranks(3, lambda rank, *files: [sys.executable, "-c", RANK, str(files[0])])
    ranks.hear(Loaded)
    yield ranks
    ranks.close()


def kill(ranks: Ranks, place: int) -> None:
    os.kill(ranks.pids[place], signal.SIGKILL)
    _gone(ranks, place)


def end(ranks: Ranks, place: int, status: int) -> None:
    ranks._controls[place].tell(Meet(status))
    _gone(ranks, place)


def _gone(ranks: Ranks, place: int) -> None:
    """Until it has ended, whoever is to hear of it. The interpreter's lock is kept, so no other thread goes on."""
    ctypes.PyDLL(None).waitid(os.P_PID, ranks.pids[place], ctypes.create_string_buffer(128), os.WEXITED | os.WNOWAIT)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED)


def told(lost: list[Exception]) -> list[str]:
    return [str(fault) for fault in lost]


def test_a_rank_that_is_gone_is_named_also_where_the_others_have_begun_to_leave(two):
    lost: list[Exception] = []
    two.watch(lost.append)
    kill(two, 1)
    two.leave()
    assert told(lost) == ["rank 2 ended with signal 9"]


def test_a_rank_is_named_before_what_breaks_off_for_want_of_it(two):
    lost: list[Exception] = []
    with contextlib.suppress(RuntimeError), two.watched(lost.append):
        os.kill(two.pids[0], signal.SIGKILL)
        raise RuntimeError("Connection reset by peer")
    assert told(lost) == ["rank 1 ended with signal 9"]


def test_a_rank_that_was_killed_is_named_and_not_one_that_misses_it(two):
    lost: list[Exception] = []
    kill(two, 1)
    end(two, 0, 3)
    two.watch(lost.append)
    two.leave()
    assert told(lost) == ["rank 2 ended with signal 9"]


def test_a_rank_that_ended_for_a_reason_of_its_own_is_named_and_not_one_that_misses_it(two):
    lost: list[Exception] = []
    end(two, 1, 1)
    end(two, 0, PARTED)
    two.watch(lost.append)
    two.leave()
    assert told(lost) == ["rank 2 ended with exit status 1"]


def test_a_rank_that_ends_by_itself_is_named_with_its_exit_status(two):
    lost: list[Exception] = []
    end(two, 0, 3)
    two.watch(lost.append)
    two.leave()
    assert told(lost) == ["rank 1 ended with exit status 3"]


def test_a_rank_that_is_gone_is_named_while_others_have_not_spoken():
    programs = {1: SILENT, 2: RANK}
    with contextlib.closing(
        Ranks(3, lambda rank, *files: [sys.executable, "-c", programs[rank], str(files[0])])
    ) as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankEnded, match=r"^rank 2 ended with signal 9$"):
            ranks.hear(Loaded)


def test_a_rank_that_ends_for_want_of_another_says_what_it_has_seen_of_that():
    program = f"""
import os, socket, sys
from worker.parallel.control import Control, Parted
Control(socket.socket(fileno=int(sys.argv[1]))).tell(Parted("Connection reset by peer"))
os._exit({PARTED})
"""
    with (
        contextlib.closing(Ranks(2, lambda _, *files: [sys.executable, "-c", program, str(files[0])])) as ranks,
        pytest.raises(RankEnded, match=r"^rank 1 has lost the others: Connection reset by peer$"),
    ):
        ranks.hear(Loaded)


def test_ranks_that_end_because_they_are_left_are_not_lost(two):
    lost: list[Exception] = []
    two.watch(lost.append)
    two.close()
    assert not lost


def test_a_rank_that_is_stopped_is_named(two, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    stop(two.pids[1])
    lost: list[Exception] = []
    is_told = threading.Event()
    two.watch(lambda fault: (lost.append(fault), is_told.set()))
    assert is_told.wait(PATIENCE_S)
    two.leave()
    assert told(lost) == ["rank 2 is stopped (SIGSTOP), and was not continued within 0.1 s"]
    os.kill(two.pids[1], signal.SIGKILL)


def test_a_rank_that_is_stopped_is_named_while_others_are_waited_for(monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    with contextlib.closing(Ranks(3, lambda _, *files: [sys.executable, "-c", SILENT, str(files[0])])) as ranks:
        stop(ranks.pids[0])
        with pytest.raises(RankEnded, match=r"^rank 1 is stopped"):
            ranks.hear(Loaded)
        os.kill(ranks.pids[0], signal.SIGKILL)


def test_a_rank_that_goes_on_in_time_is_not_lost(two):
    standing = Standing(two.pids)
    for pid in two.pids:
        stop(pid)
        assert [standing.look() for _ in range(NUM_LOOKS - 1)] == [None] * (NUM_LOOKS - 1)
        go_on(pid)
        assert standing.look() is None
    stop(two.pids[1])
    assert [standing.look() for _ in range(NUM_LOOKS)] == [*[None] * (NUM_LOOKS - 1), 1]
    go_on(two.pids[1])
