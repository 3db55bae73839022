"""What tuning made: profiles of settings, and the trials behind them.

Revision 0004, after 0003. Studies themselves stay in files of their own.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "profile",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=True),
        sa.Column("device", sa.String(length=128), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("study", sa.String(length=256), nullable=True),
        sa.Column("document", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_profile")),
    )
    op.create_index(op.f("ix_profile_model_is_active"), "profile", ["model", "is_active"])
    op.create_table(
        "tune_trial",
        sa.Column("study", sa.String(length=256), nullable=False),
        sa.Column("trial_no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("measures", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("study", "trial_no", name=op.f("pk_tune_trial")),
    )


def downgrade() -> None:
    """Drop both; indices go with their tables."""
    op.drop_table("tune_trial")
    op.drop_table("profile")
