"""Rows that can be audited, prices with a history, sums for whoever asks, and positions for whoever follows.

Rows from before belong to no chain; they were settled when they were created, as far as anybody knows.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

SUMS = (
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
WORDS = ("tenant_id", "key_id", "model", "endpoint", "sla_class", "service_tier", "cache", "price_version")


def upgrade() -> None:
    for name in ("num_reasoning_tokens", "num_drafted_tokens", "num_accepted_tokens", "engine_us", "kv_block_ms"):
        op.add_column("ledger", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("ledger", sa.Column("price_version", sa.Text, nullable=False, server_default=sa.text("''")))
    for name in ("end_user", "safety_identifier", "metadata", "trace_id", "corrects", "reason"):
        op.add_column("ledger", sa.Column(name, sa.Text))
    op.add_column("ledger", sa.Column("settled_at", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("ledger", sa.Column("chain", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("ledger", sa.Column("position", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("ledger", sa.Column("link", sa.LargeBinary))
    op.execute("UPDATE ledger SET settled_at = created_at")
    op.create_index("ledger_chain_position", "ledger", ["chain", "position"])
    op.create_index("ledger_settled_at", "ledger", ["settled_at"])
    corrections = sa.text("corrects IS NOT NULL")
    op.create_index("ledger_corrects", "ledger", ["corrects"], sqlite_where=corrections, postgresql_where=corrections)
    op.create_table(
        "ledger_chains",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("opened_at", sa.BigInteger, nullable=False),
        sa.Column("gateway", sa.Text, nullable=False),
    )
    op.create_table(
        "ledger_repeats",
        sa.Column("chain", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "ledger_closings",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("chain", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("first_position", sa.BigInteger, nullable=False),
        sa.Column("last_position", sa.BigInteger, nullable=False),
        sa.Column("last_link", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "ledger_days",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_rows", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("closed_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "ledger_cursors",
        sa.Column("follower", sa.Text, primary_key=True),
        sa.Column("chain", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "prices",
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
    op.create_table(
        "usage",
        sa.Column("width_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("starts_at", sa.BigInteger, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Text, primary_key=True) for name in WORDS),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in SUMS),
        sqlite_with_rowid=False,
    )
