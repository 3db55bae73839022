"""What the cost model knows: its state, and two more features of a step.

Revision 0003, after 0002. Steps that stand already keep NULL: nobody counted then.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NAMES = ("num_chunks", "num_prompt_logits")


def upgrade() -> None:
    """Add the columns, and the table of cost models."""
    for name in _NAMES:
        op.add_column("step", sa.Column(name, sa.BigInteger(), nullable=True))
    op.create_table(
        "model_snapshot",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("learner", sa.String(length=64), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("num_observed", sa.BigInteger(), nullable=False),
        sa.Column("mape", sa.Double(), nullable=True),
        sa.Column("coverage", sa.Double(), nullable=True),
        sa.Column("key", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("document", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "key_hash", name=op.f("pk_model_snapshot")),
    )
    op.create_index(op.f("ix_model_snapshot_key_hash_at"), "model_snapshot", ["key_hash", "at"])


def downgrade() -> None:
    """Drop them; the index goes with its table."""
    op.drop_table("model_snapshot")
    with op.batch_alter_table("step") as batch:
        for name in reversed(_NAMES):
            batch.drop_column(name)
