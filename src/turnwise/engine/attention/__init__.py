"""Attention plans, and one file per device that carries them out."""
