"""Servers that are not ours: which there are, and in the ledger's rows which of them answered and who counted.

The API key of one is sealed; the columns of the ledger stand behind the link, which is not over them where they say
nothing, so that the links of rows from before still hold.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "upstreams",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("sealed_key", sa.LargeBinary),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
        sa.Column("changed_by", sa.Text, nullable=False),
        sa.Column("deleted_at", sa.BigInteger),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.add_column("ledger", sa.Column("upstream", sa.Text))
    op.add_column("ledger", sa.Column("counted_by", sa.Text))
