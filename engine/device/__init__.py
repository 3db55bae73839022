"""Every line that touches torch."""
