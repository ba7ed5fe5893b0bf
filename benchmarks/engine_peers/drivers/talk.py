"""What every driver says over its pipes: an order a line in, an answer a line out, both JSON.

Drivers run under the interpreter in which their peer is installed, so they know the standard library and that peer, and
nothing of this repository (but for our own engine's).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

Prompts = list[list[int]]


class Peer(Protocol):
    """One engine with one model in one stored form, greedy, end tokens ignored."""

    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        """Writes what the peer needs beside the checkpoint into ``made``; nothing where it reads the checkpoint."""

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        """``facts``: num_threads, max_sequences, input_tokens, output_tokens. Returns at least its version."""

    def run(self, prompts: Prompts, num_output_tokens: int) -> list[list[int]]:
        """All prompts at once, to the end: the token ids written for each."""


def serve(peer: Peer) -> None:
    """Until the pipe is closed. An order that fails is answered with its reason."""
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = _obey(peer, order)
        except BaseException as error:
            traceback.print_exc()
            said = str(error).strip().partition("\n")[0]
            answer = {"error": f"{type(error).__name__}: {said}"[:400]}
        answers.write(json.dumps(answer) + "\n")


def _obey(peer: Peer, order: dict[str, Any]) -> dict[str, Any]:
    match order["do"]:
        case "prepare":
            peer.prepare(Path(order["checkpoint"]), Path(order["made"]), order["form"])
            return {}
        case "load":
            return peer.load(Path(order["checkpoint"]), Path(order["made"]), order["form"], order["facts"])
        case "run":
            began_at = perf_counter()
            written = peer.run(order["prompts"], order["num_output_tokens"])
            duration_s = perf_counter() - began_at
            counts = {len(token_ids) for token_ids in written}
            if len(written) != len(order["prompts"]) or counts != {order["num_output_tokens"]}:
                raise ValueError(f"{len(written)} answers of {sorted(counts)} tokens")
            return {"duration_s": duration_s, "first_token_ids": [int(token_ids[0]) for token_ids in written]}
    raise ValueError(f"no order {order['do']}")
