"""Attention backends: one file each, behind one seam (`base.AttentionBackend`)."""
