"""Sessions of the console: who signed in with which admin key, until when. The id itself is only in the browser."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("hash", sa.LargeBinary, primary_key=True),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False, index=True),
        sa.Column("key_hash", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
    )
