"""Swaps of a step that failed, which spoil its duration as those that worked do.

Revision 0005, after 0004. Rows that stand already keep NULL: nobody wrote them down then.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; neither database rewrites the table for that."""
    op.add_column("step", sa.Column("num_failed_swaps", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("step") as batch:
        batch.drop_column("num_failed_swaps")
