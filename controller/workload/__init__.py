"""Workloads: which requests arrive when, from trace files or generators. Pure Python and NumPy."""
