"""What a stranger learns from the time of an answer: ``python -m benchmarks.cache_probe [--trials N] [--plot PATH]``.

One gateway with the demo model and two tenants. The victim asks something secret; then the attacker asks the same and
something that nobody has asked, in a random order, on a quiet machine and over one connection, which is more than an
attacker will have. Could the times to the first token be told apart? The figure is the area under the ROC curve: 0.5 is
a coin, 1 is certainty. The same probe made by the victim itself shows that it would see a hit if there were one.

- prefix: the secret is a system prompt whose KV the victim has left in the engine.
- exact: the secret is a whole request that was answered before.
- flight: the secret is a whole request whose answer is being written at this moment.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import string
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import msgspec

ADMIN, VICTIM = "sk-penstock-admin-of-the-probe", "sk-penstock-of-the-victim"
NUM_WORDS = 60
FLIGHT_TOKENS = 24
"""Of an answer that is being written while the probe arrives."""
ITSELF_EVERY = 8
"""So seldom the victim probes its own flights: what it sees there is plain."""
BOUND = 0.05
COLORS = {"asked before": "#c23b3b", "never asked": "#2a78b8"}


class Times(msgspec.Struct):
    """Milliseconds to the first token, of prompts that the victim has asked and of others; and the hits among them."""

    known: list[float] = []
    fresh: list[float] = []
    num_hits: int = 0
    """By what the answers said themselves: the header, and cached_tokens of the secret."""

    def auc(self) -> float:
        """The chance that a known prompt is answered sooner than a fresh one; a tie is half (Mann-Whitney)."""
        fresh = sorted(self.fresh)
        after = sum(len(fresh) - (bisect_left(fresh, at) + bisect_right(fresh, at)) / 2 for at in self.known)
        return after / len(self.known) / len(fresh)

    def interval(self, draw: random.Random, num: int = 300) -> tuple[float, float]:
        """Of the AUC, 95 %, by resampling."""
        found = sorted(
            Times(draw.choices(self.known, k=len(self.known)), draw.choices(self.fresh, k=len(self.fresh))).auc()
            for _ in range(num)
        )
        return found[int(0.025 * num)], found[int(0.975 * num)]


class Client:
    """One tenant's connection."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def call(self, path: str, body: object) -> dict[str, object]:
        """A small request of the admin API."""
        self._connection.request("POST", path, json.dumps(body), self._headers)
        response = self._connection.getresponse()
        told: dict[str, object] = json.loads(response.read())
        if response.status >= 300:
            raise SystemExit(f"{path}: {told}")
        return told

    def begin(self, secret: str, num_tokens: int, control: str = "") -> http.client.HTTPResponse:
        """A streamed chat up to its first event."""
        body = {
            "model": "demo",
            "messages": [{"role": "system", "content": secret}, {"role": "user", "content": "Hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "temperature": 0,
        }
        headers = {**self._headers, "cache-control": control} if control else self._headers
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        response.readline()
        return response

    def probe(self, secret: str, control: str = "", num_tokens: int = 2) -> tuple[float, bool]:
        """Milliseconds to the first token, and whether the answer says that it came from a cache."""
        began_at = time.perf_counter()
        response = self.begin(secret, num_tokens, control)
        ttft_ms = 1e3 * (time.perf_counter() - began_at)
        return ttft_ms, self.end(response)

    def end(self, response: http.client.HTTPResponse) -> bool:
        """Reads on to the end. The template's first tokens are every tenant's own, so a few are always cached."""
        cached = [int(found) for found in re.findall(rb'"cached_tokens": ?(\d+)', response.read())]
        return response.headers["x-penstock-cache"] in ("hit", "shared") or any(num >= NUM_WORDS for num in cached)


class Room:
    """The victim, the attacker, and secrets."""

    def __init__(self, url: str, draw: random.Random) -> None:
        self.draw = draw
        self.victim = Client(url, VICTIM)
        self.others = Client(url, VICTIM)
        """The victim's second connection."""
        admin = Client(url, ADMIN)
        tenant = admin.call("/admin/v1/tenants", {"name": "attacker"})
        key = admin.call("/admin/v1/keys", {"tenant_id": tenant["id"], "name": "attacker"})
        self.attacker = Client(url, str(key["key"]))

    def secret(self) -> str:
        """Words that nobody has used before."""
        return " ".join("".join(self.draw.choices(string.ascii_lowercase, k=8)) for _ in range(NUM_WORDS))

    def settled(self, control: str, num_trials: int) -> Iterator[tuple[Times, Times]]:
        """Times of the attacker and of the victim itself, growing: one more trial each."""
        stranger, itself = Times(), Times()
        for _ in range(num_trials):
            known = self.secret()
            self.victim.probe(known, control)
            for client, times in ((self.attacker, stranger), (self.victim, itself)):
                self._both(client, times, known, control)
            yield stranger, itself

    def flying(self, num_trials: int) -> Iterator[tuple[Times, Times]]:
        """The same while the victim's answer is being written; it is as long either way."""
        stranger, itself = Times(), Times()
        for number in range(num_trials):
            client, times = (self.attacker, stranger) if number % ITSELF_EVERY else (self.others, itself)
            for is_known in self.draw.sample((True, False), 2):
                known = self.secret()
                flight = self.victim.begin(known, FLIGHT_TOKENS)
                ttft_ms, is_hit = client.probe(known if is_known else self.secret(), num_tokens=FLIGHT_TOKENS)
                self.victim.end(flight)
                (times.known if is_known else times.fresh).append(ttft_ms)
                times.num_hits += is_hit
            yield stranger, itself

    def _both(self, client: Client, times: Times, known: str, control: str) -> None:
        for secret in self.draw.sample((known, self.secret()), 2):
            ttft_ms, is_hit = client.probe(secret, control)
            (times.known if secret is known else times.fresh).append(ttft_ms)
            times.num_hits += is_hit


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[str]:
    """The URL of one, with a worker of one thread."""
    environ = {
        **os.environ,
        "PENSTOCK_API_KEY": VICTIM,
        "PENSTOCK_ADMIN_KEY": ADMIN,
        "PENSTOCK_ENGINE__NUM_THREADS": "1",
        "PENSTOCK_ENGINE__DEVICE": "cpu",
        "PENSTOCK_LOG__LEVEL": "warning",
    }
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--data-dir", str(folder / "data")]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"ready on (http://\S+)", line):
                yield found[1]
                return
        raise SystemExit("the gateway did not start")
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    found: dict[str, tuple[Times, Times]] = {}
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder)) as url:
        room = Room(url, draw)
        for _ in room.settled("no-store", 20):  # warm
            pass
        for name, trials in (
            ("prefix", room.settled("no-store", options.trials)),
            ("exact", room.settled("", options.trials)),
            ("flight", room.flying(options.trials)),
        ):
            *_, found[name] = trials
    print(f"{'probe':8} {'who':10} {'AUC':>6} {'95 %':>14} {'known ms':>9} {'fresh ms':>9} {'hits':>5} {'n':>6}")
    for name, both in found.items():
        for who, times in zip(("attacker", "victim"), both, strict=True):
            low, high = times.interval(draw)
            print(
                f"{name:8} {who:10} {times.auc():6.3f} {f'{low:.3f}..{high:.3f}':>14} {median(times.known):9.2f} "
                f"{median(times.fresh):9.2f} {times.num_hits:5} {len(times.known):6}"
            )
    if options.plot:
        plot(options.plot, found)
    strangers = [stranger for stranger, _ in found.values()]
    if any(times.num_hits for times in strangers) or any(abs(times.auc() - 0.5) > BOUND for times in strangers):
        raise SystemExit("a stranger learns something")


def plot(path: Path, found: dict[str, tuple[Times, Times]]) -> None:
    """Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink, muted, grid = "#1c2b39", "#6b7a88", "#e3e8ec"
    figure = Figure(figsize=(12, 6.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Time to the first token of a prompt that the victim has asked, and of one that nobody has",
        x=0.01, ha="left", fontsize=14, fontweight="bold", color=ink,
    )  # fmt: skip
    for row, who in zip(figure.subplots(2, len(found)), (0, 1), strict=True):
        for ax, (name, both) in zip(row, found.items(), strict=True):
            times: Times = both[who]
            for label, values in (("asked before", times.known), ("never asked", times.fresh)):
                ax.plot(*steps(values), color=COLORS[label], linewidth=2, label=label)
            asker = ("another tenant", "the victim itself")[who]
            ax.set_title(
                f"{name}, asked by {asker}\nAUC {times.auc():.3f}", loc="left", fontsize=9.5, fontweight="bold",
                color=ink,
            )  # fmt: skip
            everything = sorted(times.known + times.fresh)
            ax.set_xlim(0, 1.3 * everything[int(0.98 * len(everything))])
            ax.set_xlabel("ms to the first token", color=muted)
            ax.grid(True, color=grid, linewidth=0.8)
            ax.tick_params(colors=muted, labelsize=9)
            for side in ("top", "right"):
                ax.spines[side].set_visible(False)
        row[0].set_ylabel("share of the answers", color=muted)
    figure.axes[0].legend(frameon=False, fontsize=9.5, loc="lower right")
    figure.savefig(path)


def steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Their distribution function."""
    ordered = sorted(values)
    return ordered, [(number + 1) / len(ordered) for number in range(len(ordered))]


if __name__ == "__main__":
    main()
