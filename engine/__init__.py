"""MECHANISM: requests, KV blocks and one forward pass per step; no SLO, database or HTTP."""
