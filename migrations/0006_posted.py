"""Events that somebody has taken are remembered: a gateway that starts again posts what was lost, and no more."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "posted_events",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("posted_at", sa.BigInteger, nullable=False),
    )
