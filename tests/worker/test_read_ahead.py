import logging
import os
import threading
from pathlib import Path

from worker.models.read_ahead import CHUNK_BYTES, ReadAhead


def test_files_are_read_to_their_ends_one_behind_the_other(tmp_path: Path):
    pipes = [tmp_path / "first", tmp_path / "second"]
    for pipe in pipes:
        os.mkfifo(pipe)
    with ReadAhead(pipes, 4 * CHUNK_BYTES):
        for pipe in pipes:
            pipe.write_bytes(bytes(2 * CHUNK_BYTES))  # more than a pipe holds, so that somebody has read it


def test_it_ends_with_the_block_though_there_is_more_to_read():
    with ReadAhead([Path("/dev/zero")] * 2, 1 << 60):
        (reader,) = (thread for thread in threading.enumerate() if thread.name == "read ahead")
        assert reader.is_alive()
    assert not reader.is_alive()


def test_no_more_is_read_than_there_is_room_for():
    with ReadAhead([Path("/dev/zero")], 3 * CHUNK_BYTES):
        for thread in threading.enumerate():
            if thread.name == "read ahead":
                thread.join(30)
                assert not thread.is_alive()


def test_what_cannot_be_read_is_told_and_passed_over(tmp_path: Path, caplog):
    after = tmp_path / "after"
    os.mkfifo(after)
    with caplog.at_level(logging.INFO), ReadAhead([tmp_path / "missing", after], CHUNK_BYTES):
        after.write_bytes(bytes(CHUNK_BYTES))
    assert "missing is not read ahead" in caplog.text
