"""Sums say of how many of their requests something is owed, and of how much of the engine: what failed before anything
of it was delivered owes nothing, whatever it took.

What is in the sums is counted from the ledger: all of it but rows that owe nothing and were added already, which are
those up to a chain's cursor that are in none of its gaps.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

WIDTHS = (60, 3600, 86400)
WORDS = ("tenant_id", "key_id", "model", "endpoint", "sla_class", "service_tier", "cache", "price_version")
UNOWED = """
    SELECT settled_at - settled_at % {width_s} AS starts_at, {words}, count(*) AS num_requests,
        CAST(sum(CASE WHEN cache IN ('hit', 'shared') THEN 0 ELSE engine_us END) AS BIGINT) AS engine_us
    FROM ledger
    WHERE num_prompt_tokens = 0 AND num_completion_tokens = 0 AND cost_micros = 0 AND corrects IS NULL
    AND EXISTS (
        SELECT 1 FROM ledger_cursors AS added
        WHERE added.follower = 'usage' AND added.chain = ledger.chain AND added.position >= ledger.position
    )
    AND NOT EXISTS (
        SELECT 1 FROM ledger_cursors AS gap
        WHERE gap.follower LIKE 'usage<%' AND gap.chain = ledger.chain
        AND gap.position < ledger.position AND ledger.position <= CAST(substr(gap.follower, 7) AS BIGINT)
    )
    GROUP BY settled_at - settled_at % {width_s}, {words}
"""


def upgrade() -> None:
    for name in ("num_owed_requests", "owed_engine_us"):
        op.add_column("usage", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE usage SET num_owed_requests = num_requests,"
        " owed_engine_us = CASE WHEN cache IN ('hit', 'shared') THEN 0 ELSE engine_us END"
    )
    connection, places = op.get_bind(), " AND ".join(f"{name} = :{name}" for name in ("starts_at", *WORDS))
    for width_s in WIDTHS:
        unowed = connection.execute(sa.text(UNOWED.format(width_s=width_s, words=", ".join(WORDS)))).mappings().all()
        less = (
            "UPDATE usage SET num_owed_requests = num_owed_requests - :num_requests,"
            f" owed_engine_us = owed_engine_us - :engine_us WHERE width_s = {width_s} AND {places}"
        )
        if unowed:
            connection.execute(sa.text(less), list(map(dict, unowed)))
