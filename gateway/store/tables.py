"""The tables, as the migrations leave them.

Times are Unix seconds. A row that people change has a ``version``, which grows by one with each change of it and is its
ETag, and a ``revision``: the number of the store's change that touched it last, by which a directory finds what is new
to it. Nothing is deleted from such a table, only marked, so that a change is never a row that is missing.

That an index is of some rows alone is for the migrations to say: to say it here would load PostgreSQL's dialect for
everybody.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()


def _changing() -> list[sa.Column[Any]]:
    """What every row has that people change."""
    return [
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    ]


def _counts(*names: str) -> list[sa.Column[Any]]:
    """Numbers that came after the table; a row from before has none of it."""
    return [sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in names]


def _texts(*names: str) -> list[sa.Column[Any]]:
    """What a row may have to say."""
    return [sa.Column(name, sa.Text) for name in names]


install = sa.Table(
    "install",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("key_secret", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="install_is_one_row"),
)
changes = sa.Table(
    "changes",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="changes_is_one_row"),
)
organizations = sa.Table(
    "organizations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    *_changing(),
)
policies = sa.Table(
    "policies",
    metadata,
    sa.Column("name", sa.Text, sa.ForeignKey("policy_heads.name"), primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("created_by", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
)
"""Every version there ever was; a row never changes. ``document`` is the JSON of a ``policies.policy.Policy``."""
policy_heads = sa.Table(
    "policy_heads",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("current_version", sa.BigInteger, nullable=False),
    sa.Column("deleted_at", sa.BigInteger),
    sa.Column("revision", sa.BigInteger, nullable=False, index=True),
)
"""Which version counts. 0: none was written yet. A name that is used again after a deletion goes on counting."""
tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("organization_id", sa.Text, sa.ForeignKey("organizations.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("policy", sa.Text, sa.ForeignKey("policy_heads.name"), nullable=False, index=True),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("disabled_at", sa.BigInteger),
    *_changing(),
)
"""``metadata`` is a JSON object of strings, of use to people alone."""
service_accounts = sa.Table(
    "service_accounts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("deleted_at", sa.BigInteger),
    *_changing(),
    sa.CheckConstraint("role IN ('owner', 'member')", name="service_accounts_have_a_role"),
)
keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), index=True),
    sa.Column("service_account_id", sa.Text, sa.ForeignKey("service_accounts.id"), index=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("role", sa.Text),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("last_four", sa.Text, nullable=False),
    sa.Column("scopes", sa.Text),
    sa.Column("networks", sa.Text),
    sa.Column("narrowing", sa.Text),
    sa.Column("rotated_from", sa.Text),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("revoked_at", sa.BigInteger),
    *_changing(),
    sa.CheckConstraint(
        "kind = 'admin' AND tenant_id IS NULL AND role IN ('owner', 'operator', 'billing_reader')"
        " OR kind = 'api' AND tenant_id IS NOT NULL AND role IS NULL",
        name="keys_have_their_kind",
    ),
)
"""``scopes`` is the JSON of a ``restrictions.Scopes``, ``networks`` a JSON list of CIDR blocks, ``narrowing`` the JSON
of a ``policies.policy.Narrowing``; null restricts nothing."""
audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("actor_key_id", sa.Text, nullable=False),
    sa.Column("actor_name", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("object_kind", sa.Text, nullable=False),
    sa.Column("object_id", sa.Text, nullable=False, index=True),
    sa.Column("before", sa.Text),
    sa.Column("after", sa.Text),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("address", sa.Text, nullable=False),
)
"""Who changed what: ``before`` and ``after`` are JSON objects without secrets. No foreign keys: it outlives everything.
Ids are in the order of time."""
idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("body_hash", sa.LargeBinary, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("response", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False, index=True),
)
"""What an admin call with an Idempotency-Key was answered."""
ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_sequences", sa.Integer, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("queue_ms", sa.Double, nullable=False),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("duration_ms", sa.Double, nullable=False),
    sa.Column("sla_class", sa.Text, nullable=False, server_default="standard"),
    sa.Column("service_tier", sa.Text, nullable=False, server_default="default"),
    sa.Column("cache", sa.Text, nullable=False, server_default="bypass"),
    sa.Column("policy_name", sa.Text, nullable=False, server_default="default"),
    sa.Column("policy_version", sa.BigInteger, nullable=False, server_default="1"),
    sa.Column("cost_micros", sa.BigInteger, nullable=False, server_default="0"),
    *_counts("num_reasoning_tokens", "num_drafted_tokens", "num_accepted_tokens", "engine_us", "kv_block_ms"),
    sa.Column("price_version", sa.Text, nullable=False, server_default=sa.text("''")),
    *_texts("end_user", "safety_identifier", "metadata", "trace_id", "corrects", "reason"),
    *_counts("settled_at", "chain", "position"),
    sa.Column("link", sa.LargeBinary),
    *_texts("upstream", "counted_by"),
    sa.Index("ledger_chain_position", "chain", "position"),
    sa.Index("ledger_settled_at", "settled_at"),
)
sa.Index("ledger_corrects", ledger.c.corrects)
ledger_chains = sa.Table(
    "ledger_chains",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("opened_at", sa.BigInteger, nullable=False),
    sa.Column("gateway", sa.Text, nullable=False),
)
ledger_repeats = sa.Table(
    "ledger_repeats",
    metadata,
    sa.Column("chain", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
)
"""Places of rows that were not written, since their requests had rows elsewhere already; without content: of rows that
are lost."""
ledger_closings = sa.Table(
    "ledger_closings",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("chain", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("first_position", sa.BigInteger, nullable=False),
    sa.Column("last_position", sa.BigInteger, nullable=False),
    sa.Column("last_link", sa.LargeBinary, nullable=False),
)
ledger_days = sa.Table(
    "ledger_days",
    metadata,
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("closed_at", sa.BigInteger, nullable=False),
)
ledger_cursors = sa.Table(
    "ledger_cursors",
    metadata,
    sa.Column("follower", sa.Text, primary_key=True),
    sa.Column("chain", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("position", sa.BigInteger, nullable=False),
)
posted_events = sa.Table(
    "posted_events",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("posted_at", sa.BigInteger, nullable=False),
)
"""Events that the webhook has taken."""
sink_states = sa.Table(
    "sink_states",
    metadata,
    sa.Column("sink", sa.Text, primary_key=True),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("num_events", sa.BigInteger, nullable=False),
    sa.Column("delivered_at", sa.BigInteger),
    sa.Column("num_tries", sa.BigInteger, nullable=False),
    sa.Column("retry_at", sa.Double, nullable=False),
    sa.Column("last_error", sa.Text),
    sa.Column("last_error_at", sa.BigInteger),
)
"""How delivery stands. ``num_tries``: those that failed, one behind the other, until now."""
sink_failures = sa.Table(
    "sink_failures",
    metadata,
    sa.Column("sink", sa.Text, primary_key=True),
    sa.Column("event_id", sa.Text, primary_key=True),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("num_tries", sa.BigInteger, nullable=False),
    sa.Column("failed_at", sa.BigInteger, nullable=False),
    sa.Column("is_due", sa.Boolean, nullable=False),
)
"""Events that the receiver has refused. ``is_due``: somebody has asked for another try."""
sink_skips = sa.Table(
    "sink_skips",
    metadata,
    sa.Column("sink", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, primary_key=True),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("first_at", sa.BigInteger, nullable=False),
    sa.Column("last_at", sa.BigInteger, nullable=False),
)
"""Rows that were passed over, since nothing says who their tenant is to the receiver; times are the rows'."""
adapters = sa.Table(
    "adapters",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("adapter_id", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("rank", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("loaded_at", sa.BigInteger, nullable=False),
    sa.Column("loaded_by", sa.Text, nullable=False),
    sa.Column("unloaded_at", sa.BigInteger),
    *_changing(),
)
"""A name stays with its model for good. ``digest`` is empty and the numbers are 0 until a worker has read it."""
upstreams = sa.Table(
    "upstreams",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("sealed_key", sa.LargeBinary),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("changed_at", sa.BigInteger, nullable=False),
    sa.Column("changed_by", sa.Text, nullable=False),
    sa.Column("deleted_at", sa.BigInteger),
    *_changing(),
)
"""``document`` is the JSON of a ``policies.upstreams.terms.Upstream``; ``sealed_key`` its API key (gateway/secrets)."""
prices = sa.Table(
    "prices",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("sla_class", sa.Text, nullable=False),
    sa.Column("effective_from", sa.BigInteger, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("created_by", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False, index=True),
)
usage = sa.Table(
    "usage",
    metadata,
    sa.Column("width_s", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("starts_at", sa.BigInteger, primary_key=True, autoincrement=False),
    *(
        sa.Column(name, sa.Text, primary_key=True)
        for name in (
            "tenant_id",
            "key_id",
            "model",
            "endpoint",
            "sla_class",
            "service_tier",
            "cache",
            "price_version",
        )
    ),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in (
            "num_requests",
            "num_prompt_tokens",
            "num_cached_tokens",
            "num_completion_tokens",
            "num_reasoning_tokens",
            "engine_us",
            "kv_block_ms",
            "cost_micros",
            "prompt_micros",
            "cached_prompt_micros",
            "completion_micros",
            "reasoning_micros",
            "cache_hit_micros",
            "request_micros",
            "engine_second_micros",
        )
    ),
    *_counts("num_owed_requests", "owed_engine_us"),
    sqlite_with_rowid=False,
)
"""Sums over the ledger for spans of ``width_s`` from ``starts_at``, by the time of settling; corrections count in all
but the numbers of requests. What each kind cost adds up to the whole, as far as the prices are known. What is owed is
that of rows that owe something; of the engine, of answers from no cache."""
