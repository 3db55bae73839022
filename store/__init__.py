"""MEMORY: the only place that speaks SQL; never blocks a step."""
