"""First tables: run, step, step_work, request, event.

Revision 0001, after nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables and the indices that the queries need."""
    op.create_table(
        "event",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("event_no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("step_no", sa.BigInteger(), nullable=True),
        sa.Column("numbers", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "event_no", name=op.f("pk_event")),
    )
    op.create_index(op.f("ix_event_at_run_id_event_no"), "event", ["at", "run_id", "event_no"])
    op.create_index(op.f("ix_event_kind_at"), "event", ["kind", "at"])
    op.create_index(op.f("ix_event_request_id"), "event", ["request_id"])

    op.create_table(
        "request",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("slo_class", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("ttft_target_s", sa.Double(), nullable=True),
        sa.Column("tpot_target_s", sa.Double(), nullable=True),
        sa.Column("e2e_target_s", sa.Double(), nullable=True),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=False),
        sa.Column("arrived_at", sa.BigInteger(), nullable=False),
        sa.Column("arrived_clock_s", sa.Double(), nullable=False),
        sa.Column("admitted_at", sa.BigInteger(), nullable=True),
        sa.Column("first_token_at", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.BigInteger(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=True),
        sa.Column("prefill_s", sa.Double(), nullable=True),
        sa.Column("decode_s", sa.Double(), nullable=True),
        sa.Column("ttft_s", sa.Double(), nullable=True),
        sa.Column("tpot_s", sa.Double(), nullable=True),
        sa.Column("e2e_s", sa.Double(), nullable=True),
        sa.Column("longest_gap_s", sa.Double(), nullable=True),
        sa.Column("fluidity", sa.Double(), nullable=True),
        sa.Column("num_preemptions", sa.BigInteger(), nullable=False),
        sa.Column("decision", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("is_degraded", sa.Boolean(), nullable=False),
        sa.Column("predicted_ttft_s", sa.Double(), nullable=True),
        sa.Column("finish_reason", sa.String(length=16), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("is_ttft_met", sa.Boolean(), nullable=True),
        sa.Column("is_tpot_met", sa.Boolean(), nullable=True),
        sa.Column("is_e2e_met", sa.Boolean(), nullable=True),
        sa.Column("attained", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "request_id", name=op.f("pk_request")),
    )
    op.create_index(
        op.f("ix_request_arrived_at_run_id_request_id"),
        "request",
        ["arrived_at", "run_id", "request_id"],
    )
    op.create_index(op.f("ix_request_request_id"), "request", ["request_id"])
    op.create_index(op.f("ix_request_slo_class_arrived_at"), "request", ["slo_class", "arrived_at"])

    op.create_table(
        "run",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("replica_id", sa.String(length=64), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("end_reason", sa.String(length=32), nullable=True),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("attention_backend", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("profile", sa.String(length=128), nullable=True),
        sa.Column("code_version", sa.String(length=64), nullable=False),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run")),
    )
    op.create_table(
        "step",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("step_no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("clock_s", sa.Double(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("planner_s", sa.Double(), nullable=False),
        sa.Column("execute_s", sa.Double(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_requests", sa.BigInteger(), nullable=False),
        sa.Column("decode_context_tokens", sa.BigInteger(), nullable=False),
        sa.Column("chunk_past_tokens", sa.BigInteger(), nullable=False),
        sa.Column("chunk_squared_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_emitted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_running", sa.BigInteger(), nullable=False),
        sa.Column("num_waiting", sa.BigInteger(), nullable=False),
        sa.Column("num_preempted", sa.BigInteger(), nullable=False),
        sa.Column("num_blocks_used", sa.BigInteger(), nullable=False),
        sa.Column("num_blocks_total", sa.BigInteger(), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=True),
        sa.Column("token_budget", sa.BigInteger(), nullable=True),
        sa.Column("lower_bound_tokens", sa.BigInteger(), nullable=True),
        sa.Column("upper_bound_tokens", sa.BigInteger(), nullable=True),
        sa.Column("binding_constraint", sa.String(length=64), nullable=True),
        sa.Column("tightest_request_id", sa.String(length=64), nullable=True),
        sa.Column("slack_s", sa.Double(), nullable=True),
        sa.Column("predicted_mean_s", sa.Double(), nullable=True),
        sa.Column("predicted_upper_s", sa.Double(), nullable=True),
        sa.Column("model_version", sa.BigInteger(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "step_no", name=op.f("pk_step")),
    )
    op.create_index(op.f("ix_step_at_run_id_step_no"), "step", ["at", "run_id", "step_no"])

    op.create_table(
        "step_work",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("step_no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_computed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("token_index", sa.BigInteger(), nullable=True),
        sa.Column("token_offset_s", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "step_no", "request_id", name=op.f("pk_step_work")),
    )
    op.create_index(
        op.f("ix_step_work_request_id_run_id_step_no"),
        "step_work",
        ["request_id", "run_id", "step_no"],
    )


def downgrade() -> None:
    """Drop every table; their indices go with them."""
    op.drop_table("step_work")
    op.drop_table("step")
    op.drop_table("run")
    op.drop_table("request")
    op.drop_table("event")
