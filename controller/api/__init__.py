"""The HTTP door: OpenAI-compatible inference, health, metrics and telemetry."""
