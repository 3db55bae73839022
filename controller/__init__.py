"""DECISION (`policy/`, pure) and DOORS (HTTP, CLI, benchmarks); never touches torch."""
