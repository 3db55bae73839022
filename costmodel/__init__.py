"""PREDICTION: how long a step would take and how sure we are; never a clock, a thread or SQL."""
