"""The processes of the other ranks, as rank 0 has them: start, tell, hear, watch, end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from worker.models import ModelError
from worker.parallel.control import Any, Control, Failed, Kept, Parted, Read, Refused, Unable
from worker.parallel.duty import PARTED

LAST_WORDS_S = 2.0
"""Between the end of a rank's socket and that of its process."""
FAREWELL_S = 5.0
"""A rank that has been left so long and is still there is killed."""
LOOK_S, NUM_LOOKS = 1.0, 10
"""A rank that is stopped (SIGSTOP) at so many looks on end, so far apart, is as good as gone: the others wait for it.
Looks are counted, and not seconds, since whoever stopped all of them may let rank 0 go on a moment earlier."""

Kind = TypeVar("Kind")
Command = Callable[[int, int, int], Sequence[str]]
"""From a rank and the numbers of the files that are its ends of the sockets: for the steps, and for what is read beside
them."""


class RankEnded(Exception):
    """A rank is gone and has not said why, or it is stopped; which and how, in one sentence."""


Lost = Callable[[ModelError | RankEnded], None]


class Standing:
    """Which of these processes, children of this one, has been stopped for long; only Linux tells."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._num_looks = pids, [0] * len(pids)

    def look(self) -> int | None:
        """Its place, where one has been stopped at each of the last NUM_LOOKS looks."""
        for place, pid in enumerate(self._pids):
            self._num_looks[place] = self._num_looks[place] + 1 if _is_stopped(pid) else 0
            if self._num_looks[place] >= NUM_LOOKS:
                return place
        return None


def _is_stopped(pid: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _stopped(place: int) -> RankEnded:
    return RankEnded(f"rank {place + 1} is stopped (SIGSTOP), and was not continued within {NUM_LOOKS * LOOK_S:g} s")


class Ranks:
    """Ranks 1 and up. They end when this process does, however it ends: their sockets tell them."""

    def __init__(self, num_ranks: int, command: Command) -> None:
        self._controls: list[Control] = []
        self._readings: list[Control] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watch: tuple[threading.Thread, socket.socket] | None = None
        """And what ends it when it is closed."""
        try:
            for rank in range(1, num_ranks):
                ours, control = socket.socketpair()
                self._controls.append(Control(ours))
                ours, reading = socket.socketpair()
                self._readings.append(Control(ours))
                with control, reading:
                    files = control.fileno(), reading.fileno()
                    process = subprocess.Popen(command(rank, *files), stdin=subprocess.DEVNULL, pass_fds=files)
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, message: Any) -> None:
        """All of them. Raises OSError where one is gone."""
        for control in self._controls:
            control.tell(message)

    def hear(self, kind: type[Kind]) -> list[Kind]:
        """One message of each. Raises ModelError where one cannot start, RankEnded where one is gone or stopped,
        whomever the others keep waiting.
        """
        heard: dict[int, Kind] = {}
        poll, places = self._polled(select.POLLIN)
        standing = Standing(self.pids)
        while len(heard) < len(self._controls):
            ready = poll.poll(LOOK_S * 1e3)
            if not ready and (stopped := standing.look()) is not None:
                raise _stopped(stopped)
            for number, _ in ready:
                message = self._controls[place := places[number]].hear()
                if not isinstance(message, kind):
                    first = self._first_to_end([place])
                    raise self._fault(first, message if first == place else None)
                heard[place] = message
        return [heard[place] for place in range(len(self._controls))]

    def tell_to_read(self, message: Read) -> None:
        """All of them, beside the steps. Raises OSError where one is gone."""
        for reading in self._readings:
            reading.tell(message)

    def hear_what_is_read(self) -> list[Kept | Refused]:
        """What each makes of what it was told to read last. Raises OSError where one is gone."""
        heard = []
        for reading in self._readings:
            message = reading.hear()
            if not isinstance(message, Kept | Refused):
                raise ConnectionResetError("a rank is gone")
            heard.append(message)
        return heard

    def unable(self) -> list[Unable]:
        """Of the last step, who could not compute it. Raises OSError where one is gone."""
        heard = []
        for control in self._controls:
            if control.has_heard:
                message = control.hear()
                if not isinstance(message, Unable):
                    raise ConnectionResetError("a rank is gone")
                heard.append(message)
        return heard

    def watch(self, lost: Lost) -> None:
        """From now on ``lost`` is called, on another thread and once, when one of them ends before ``close``, or is
        stopped; with what ``hear`` would raise. What is still heard is ``unable`` alone."""
        leaving, left = socket.socketpair()
        self._watch = threading.Thread(target=self._wait, args=(lost, left), name="ranks", daemon=True), leaving
        self._watch[0].start()

    @contextlib.contextmanager
    def watched(self, lost: Lost) -> Iterator[None]:
        """``watch``, until this is left; nothing is heard meanwhile."""
        self.watch(lost)
        try:
            yield
        except (OSError, RuntimeError):
            self.missed()
            raise
        finally:
            self._look_away()

    def missed(self) -> None:
        """Call it where something that all ranks do together broke off. A rank that is gone may be the reason, and its
        end is heard of within moments: ``lost`` is called before this returns."""
        if self._watch is not None:
            self._watch[0].join(LAST_WORDS_S)

    def _look_away(self) -> None:
        if self._watch is not None:
            thread, leaving = self._watch
            leaving.close()
            thread.join()
            self._watch = None

    def leave(self) -> None:
        """They are told to end."""
        self._look_away()
        for control in (*self._controls, *self._readings):
            control.close()

    def close(self) -> None:
        """They end, and are waited for."""
        self.leave()
        for process in self._processes:
            try:
                process.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _polled(self, events: int) -> tuple[select.poll, dict[int, int]]:
        """Their sockets, each of them with its place."""
        poll = select.poll()
        places: dict[int, int] = {}
        for place, control in enumerate(self._controls):
            places[control.connection.fileno()] = place
            poll.register(control.connection, events)
        return poll, places

    def _wait(self, lost: Lost, left: socket.socket) -> None:
        poll, places = self._polled(0)  # nothing but their ends
        poll.register(left, select.POLLIN)
        standing = Standing(self.pids)
        with left:
            while not (ready := poll.poll(LOOK_S * 1e3)):
                if (stopped := standing.look()) is not None:
                    return lost(_stopped(stopped))
            # One that has ended is told of also where this process leaves already: for want of it, perhaps.
            ended = [places[number] for number, _ in ready if number in places]
        if not ended:
            return
        place = self._first_to_end(ended)
        last = None
        with contextlib.suppress(OSError):
            last = self._controls[place].hear()
        lost(self._fault(place, last))

    def _first_to_end(self, ended: list[int]) -> int:
        """Who was killed, if anybody, or ended for a reason of its own: whoever misses another rank ends by itself, and
        may be heard of earlier."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[ended[0]].wait(LAST_WORDS_S)
        ends = {place: status for place, each in enumerate(self._processes) if (status := each.poll()) is not None}
        killed = [place for place, status in ends.items() if status < 0]
        others = [place for place in (*ended, *ends) if ends.get(place) != PARTED]
        return (killed or others or ended)[0]

    def _fault(self, place: int, last: Any | None) -> ModelError | RankEnded:
        if isinstance(last, Failed):
            return ModelError(f"rank {place + 1}: {last.reason}")
        if isinstance(last, Parted):
            return RankEnded(f"rank {place + 1} has lost the others: {last.reason}")
        try:
            status = self._processes[place].wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return RankEnded(f"rank {place + 1} has closed its socket")
        how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        return RankEnded(f"rank {place + 1} ended with {how}")
