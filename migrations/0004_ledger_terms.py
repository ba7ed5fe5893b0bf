"""A row says on which terms its request was served: class and tier, what the cache did, under which policy, at what
cost.

Rows from before were served when there was one class, no cache, no policy and no price.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for column in (
        sa.Column("sla_class", sa.Text, nullable=False, server_default="standard"),
        sa.Column("service_tier", sa.Text, nullable=False, server_default="default"),
        sa.Column("cache", sa.Text, nullable=False, server_default="bypass"),
        sa.Column("policy_name", sa.Text, nullable=False, server_default="default"),
        sa.Column("policy_version", sa.BigInteger, nullable=False, server_default="1"),
        sa.Column("cost_micros", sa.BigInteger, nullable=False, server_default="0"),
    ):
        op.add_column("ledger", column)
