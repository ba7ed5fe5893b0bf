"""``python guard.py DIRECTORY COMMAND...``: runs what is asked for until whoever asks is gone, which is when standard
input ends. Then everything that the command has started ends at once, and the directory is deleted: a compiler starts
others, and none of them would notice. Exit status: the command's."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading


def main(directory: str, *command: str) -> int:
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(error, file=sys.stderr)
        return 126

    is_alone = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # nothing but its end
        poll.poll()
        is_alone.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    status = process.wait()
    if is_alone.is_set():
        watching.join()  # the command has ended by it, and there is more to do
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
