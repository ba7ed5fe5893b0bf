"""What was delivered is written down: a row for each request, keyed by its id, so that writing twice is writing once.

No foreign keys: a row outlives the tenant and the key it names, and a commit must not wait for, or fail over, either.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "ledger",
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
    )
