"""The shape of config.toml, with its defaults. How it is read and checked as a whole is ``configuration``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policies.console import Console as Console  # of the whole, as are those named like it
from policies.devices import Claim
from policies.engine import Engine as Engine
from policies.engine import Quantization as Quantization
from policies.engine import Speculation as Speculation
from policies.holding import Grammars
from policies.observing import Log as Log
from policies.observing import Metrics as Metrics
from policies.observing import Tracing as Tracing
from policies.policy import Name, Policy
from policies.pricelist import Proposed
from policies.section import (
    MAX_S,
    Milliseconds,
    MillisecondsOrNone,
    NonNegative,
    Positive,
    Seconds,
    SecondsOrNone,
    Section,
    Threads,
)
from policies.sinks import Sink
from policies.upstreams.terms import Model as ModelName
from policies.upstreams.terms import Name as AdapterName
from policies.upstreams.terms import Upstream

Port = Annotated[int, Meta(ge=0, le=65535)]
ToolParser = Literal["auto", "hermes", "llama", "mistral", "deepseek", "kimi", "tagged", "glm", "harmony", "json"]
Origin = Annotated[str, Meta(pattern=r"^(\*|https?://[A-Za-z0-9.\-\[\]:]+)$(?!\n)")]


class Server(Section, frozen=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: Port = 8080
    """0: any free port; the ready line names it."""
    max_body_bytes: Positive = 16 << 20
    drain_s: Seconds = 30.0
    """After SIGTERM: how long running answers may take to finish before they are cut."""
    max_stream_buffer_bytes: Positive = 256 << 10
    """Bytes of one stream that may wait in its socket; past it only token ids are kept until the client reads on."""
    stall_s: Seconds = 60.0
    """How long a client may read nothing, or send less than 64 KiB of a body, before it is given up."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Gateway processes on this port; more than one share Redis and PostgreSQL."""
    heartbeat_s: Seconds = 15.0
    """A stream that has said nothing for so long is sent a comment, as proxies cut connections that are silent (common
    limits start at 30 s)."""
    coalesce_ms: Annotated[float, Meta(ge=0, le=100)] = 4.0
    """While the gateway is busy, the chunks of a stream are at least so far apart, and tokens that come meanwhile leave
    together; 0: never."""
    tls_cert: str = ""
    """PEM file of the certificate, and of those that it depends on; empty: plain HTTP. Read again when it changes."""
    tls_key: str = ""
    """PEM file of its private key."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call from a browser: "https://app.example.com", or "*" for all."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks of proxies that are believed about whom they speak for: "10.0.0.0/8"."""
    forwarded_header: Literal["x-forwarded-for", "forwarded"] = "x-forwarded-for"
    """The header that they say it in. It must be the one that they set themselves: another one comes from clients."""


class Store(Section, frozen=True):
    """Tenants, keys and the ledger."""

    data_dir: Annotated[str, Meta(min_length=1)] = "data"
    url: str = ""
    """SQLAlchemy URL of PostgreSQL (postgresql+asyncpg://...); empty: SQLite in data_dir."""
    ledger_flush_ms: MillisecondsOrNone = 2.0
    """How long a finished request may wait for others to share its commit."""
    max_ledger_backlog: Positive = 100_000
    """Rows waiting to be written before new requests are refused."""


class Ledger(Section, frozen=True):
    """What is owed, also when a process or the machine dies in the middle of an answer."""

    mark_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Completion tokens that a stream's client may be ahead of what the disk knows to have been delivered: at most so
    many of a stream are not owed when the machine is lost."""
    close_after_s: SecondsOrNone = 3600.0
    """After the end of a day (UTC) its rows are closed under one digest; rows that come later fall to the next day."""


class SlaClass(Section, frozen=True, kw_only=True):
    """A class of service: what it promises, how long and how many may wait for it, and what it gets of the engine."""

    priority: Annotated[int, Meta(ge=0, le=15)]
    """Smaller goes first, in the queue and in the engine, once every class has its guaranteed share."""
    ttft_ms: Milliseconds
    """Target of the time to the first token; also the deadline by which a tenant's own requests are ordered."""
    tpot_ms: Milliseconds
    """Target of the time for each further token."""
    max_ttft_ms: MillisecondsOrNone = 0.0
    """A request whose first token is predicted later is refused at once; 0: only ``max_wait_s`` counts."""
    share: Annotated[float, Meta(gt=0, le=1)]
    """Of the tokens served while it has requests waiting, this much is its own, whatever the others ask for."""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Share, among classes of equal priority, of what the guarantees leave over."""
    max_wait_s: Seconds = 120.0
    """A request that waited so long for a worker is refused with 408."""
    max_waiting: Positive = 1024
    """Requests that one model holds in line for this class; past it, requests of tenants that have more than an equal
    part of the places are refused with 503."""
    service_tier: Literal["", "default", "flex", "priority"] = ""
    """The ``service_tier`` by which requests ask for it."""


CLASSES = {
    "interactive": SlaClass(
        priority=0,
        ttft_ms=1000.0,
        tpot_ms=100.0,
        max_ttft_ms=20_000.0,
        share=0.5,
        max_wait_s=20.0,
        service_tier="priority",
    ),
    "standard": SlaClass(
        priority=1, ttft_ms=5000.0, tpot_ms=200.0, share=0.3, max_wait_s=120.0, service_tier="default"
    ),
    "batch": SlaClass(priority=2, ttft_ms=600_000.0, tpot_ms=1000.0, share=0.1, max_wait_s=3600.0, service_tier="flex"),
}
"""Where the settings name none."""


class Limits(Section, frozen=True):
    """How limits are kept; what they are, policies say."""

    completion_estimate: Positive = 256
    """Completion tokens set aside for an answer when it is admitted, or what it asked for if that is less; it is topped
    up by as many while it is written."""


class Cache(Section, frozen=True):
    """Exact answers, and answers to repeated Idempotency-Keys."""

    max_bytes: NonNegative = 64 << 20
    """Of answers kept in this process's memory; 0: none are kept, though equal requests still share one flight."""
    max_entry_bytes: Positive = 1 << 20
    """A longer answer is not kept."""
    idempotency_ttl_s: Annotated[int, Meta(ge=1, le=int(MAX_S))] = 86_400
    """How long the same Idempotency-Key gives the same answer."""


class Responses(Section, frozen=True):
    """What is kept of responses, of chats that ask for it and of conversations; what is written without a client."""

    store: bool = True
    """false: none is kept, whatever requests and policies say."""
    retention_s: Seconds = 2_592_000.0
    """So long one is kept, 30 days as at OpenAI; a conversation from when it was last added to."""
    max_bytes_per_tenant: Positive = 1 << 30
    """What a tenant's kept responses may take, as much its kept chats, and as much its conversations; past it those are
    deleted that would expire first."""
    max_background: Positive = 1024
    """Responses that this gateway writes in the background at once; one more is refused with 503."""
    max_background_per_tenant: Positive = 64
    """Of those, one tenant's; one more is refused with 429."""
    max_sockets: Positive = 1024
    """WebSockets that this gateway has open at once; one more is refused with 503."""
    max_sockets_per_tenant: Positive = 256
    """Of those, one tenant's; one more is refused with 429."""
    socket_idle_s: Seconds = 600.0
    """A WebSocket over which nothing was asked for so long, or is being answered, is closed."""
    socket_max_s: Seconds = 3600.0
    """After so long, an hour as at OpenAI, it takes nothing more, and is closed when all is answered."""


class Redis(Section, frozen=True):
    """What several gateways share besides the store: limits, exact answers, live counters, notices of change."""

    url: str = ""
    """"redis://host:6379/0"; empty: this gateway is alone and keeps all of it in memory."""
    prefix: str = "penstock:"
    """Of all keys."""
    timeout_ms: Milliseconds = 50.0
    """Of one command; longer counts as gone."""
    retry_s: Seconds = 2.0
    """After a failure Redis is not asked for so long; then one command tries it."""


class Billing(Section, frozen=True):
    """Money."""

    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$(?!\n)")] = "USD"
    """ISO 4217; all prices and budgets are in it."""
    webhook_url: str = ""
    """Where budget alerts are posted, signed; empty: they are only logged."""


class Workers(Section, frozen=True):
    """Worker processes and their sockets."""

    start_timeout_s: Seconds = 600.0
    """From start to ready, weights loaded; longer is a failed start."""
    silence_timeout_s: Seconds = 30.0
    """Without a frame for so long a worker counts as stuck and is replaced."""
    restart_backoff_s: Seconds = 0.5
    """Before the first restart; doubles with each failure in a row, up to max_restart_backoff_s."""
    max_restart_backoff_s: Seconds = 30.0
    max_send_buffer_bytes: Positive = 64 << 20
    """Frames waiting for one worker to read them; past it the worker counts as stuck."""
    max_failovers: NonNegative = 3
    """So many workers may be lost with one request before it gets ahead of where it stood, and another goes on with it
    each time; with one more it fails. 0: whatever a lost worker had fails. From 3 on a request that ends its workers
    fails alone: after two losses it is kept from others that had two, after three from everybody."""
    failover_wait_s: Seconds = 120.0
    """So long a request that lost its worker waits for another one to go on with it; then it fails."""


class Memory(Section, frozen=True):
    """What the models that are started here may take together; one that has no room waits until idle ones have left."""

    budget_bytes: NonNegative = 0
    """Weights and KV of all of them; 0: what the machine has free when the gateway starts, or no such plan where they
    are on a CUDA device."""


class Text(Section, frozen=True):
    """Prompts to tokens."""

    inline_chars: Positive = 4096
    """Prompts up to this length are tokenised on the event loop; longer ones on a thread."""
    num_threads: Threads = 1


class Model(Section, frozen=True):
    """One served model, named as clients ask for it."""

    source: str = "demo"
    """A directory in Hugging Face layout, a hub id, or "demo"."""
    replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    """Worker processes to start here."""
    addresses: tuple[str, ...] = ()
    """Workers that run already elsewhere: "unix:/path" or "tcp:host:port"."""
    load_at_start: bool = True
    """false: loaded when somebody asks for it."""
    idle_unload_s: SecondsOrNone = 0.0
    """Unused for so long it is unloaded, and loaded again when somebody asks for it; 0: never."""
    pinned: bool = False
    """Not unloaded to make room for others."""
    adapters: dict[AdapterName, Annotated[str, Meta(min_length=1)]] = msgspec.field(default_factory=dict)
    """Directories in PEFT's layout, where the workers run, by the names that clients ask for; served when the store has
    never had an adapter of that name, from then on the store's word counts."""
    tool_parser: ToolParser = "auto"
    """How it writes calls of tools; auto: as its chat template does."""
    reasoning_parser: Literal["auto", "none", "think", "mistral", "seed"] = "auto"
    """How it writes its reasoning; auto: as its chat template does."""
    engine: Engine = Engine()


class Files(Section, frozen=True):
    """What tenants upload."""

    directory: str = ""
    """Empty: "files" in the store's data_dir. Gateways that share a PostgreSQL share this directory, too."""
    max_file_bytes: Positive = 512 << 20
    max_tenant_bytes: Positive = 10 << 30
    """Of all files of one tenant together."""
    max_tenant_files: Positive = 100_000
    """Of one tenant, empty ones too; with more of them no other is taken."""
    batch_expires_s: Annotated[int, Meta(ge=3600, le=int(MAX_S))] = 2_592_000
    """How long a file for a batch, and what a batch has written, is kept where its client does not say."""
    max_open_uploads: Positive = 100
    """Of one tenant, that come in parts and are neither completed nor cancelled."""
    max_open_parts: Positive = 20_000
    """Of those together; one more is refused with 429."""
    max_arriving: Positive = 64
    """Files and parts that this gateway receives at once; one more is refused with 503."""
    max_arriving_per_tenant: Positive = 16
    """Of those, one tenant's; one more is refused with 429."""


class Batches(Section, frozen=True):
    """Files of requests, answered when there is room."""

    max_lines: Positive = 50_000
    max_input_bytes: Positive = 200_000_000
    max_in_flight: Positive = 128
    """Lines of all batches together that this gateway has under way at a time; fewer where others wait or limits are
    near."""
    max_open: Positive = 100
    """Batches of one tenant that are not over."""
    group_by_prefix: bool = True
    """Lines that begin alike follow each other, so that the prefix cache has what they share."""
    lease_s: Annotated[float, Meta(ge=1, le=MAX_S)] = 30.0
    """After so long without a word from the gateway that works on a batch, another one goes on with it."""


class Settings(Section, frozen=True):
    """The whole of config.toml."""

    server: Server = Server()
    store: Store = Store()
    ledger: Ledger = Ledger()
    classes: dict[Name, SlaClass] = msgspec.field(default_factory=lambda: dict(CLASSES))
    policies: dict[Name, Policy] = msgspec.field(default_factory=lambda: {"default": Policy()})
    """Made in the store when it has none of that name; from then on the store's word counts."""
    prices: tuple[Proposed, ...] = ()
    """Put on the price list when it has never had one of that model and class; from then on the list's word counts."""
    sinks: dict[str, Sink] = msgspec.field(default_factory=dict)
    """Who is sent the ledger's rows as events."""
    limits: Limits = Limits()
    files: Files = Files()
    batches: Batches = Batches()
    cache: Cache = Cache()
    responses: Responses = Responses()
    redis: Redis = Redis()
    billing: Billing = Billing()
    console: Console = Console()
    workers: Workers = Workers()
    memory: Memory = Memory()
    text: Text = Text()
    grammars: Grammars = Grammars()
    log: Log = Log()
    tracing: Tracing = Tracing()
    metrics: Metrics = Metrics()
    engine: Engine = Engine()
    models: dict[ModelName, Model] = msgspec.field(default_factory=dict)
    """Empty: the demo model under the name "demo", unless there are upstreams."""
    upstreams: tuple[Upstream, ...] = ()
    """Servers elsewhere; those of the admin API come to these."""


class WorkerSettings(Section, frozen=True):
    """What one worker process is told, as JSON on its command line."""

    name: str
    """For logs and metrics: "demo-0"."""
    model: str
    """As clients name it."""
    source: str
    listen: str
    """ "unix:/path" or "tcp:host:port"."""
    exit_with_stdin: bool = False
    """The end of standard input means that the parent is gone: stop."""
    replica: NonNegative = 0
    """Which of its model's workers on this machine it is."""
    claims: tuple[Claim, ...] = ()
    """What all workers of whoever started it ask for of this machine, loaded at the moment or not; empty: it is by
    itself."""
    engine: Engine = Engine()
    log: Log = Log()
    """As its gateway's."""
