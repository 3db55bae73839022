"""Benchmarks against a server over HTTP."""
