"""What a step retried, moved and left in the prefix cache.

Revision 0002, after 0001. Rows that stand already keep NULL: nobody counted then.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NAMES = ("num_retries", "num_swapped_blocks", "num_blocks_cached")


def upgrade() -> None:
    """Add the columns; neither database rewrites the table for that."""
    for name in _NAMES:
        op.add_column("step", sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("step") as batch:
        for name in reversed(_NAMES):
            batch.drop_column(name)
