"""MECHANISM: requests, KV blocks and one forward pass per step; never an SLO, a database or HTTP."""
