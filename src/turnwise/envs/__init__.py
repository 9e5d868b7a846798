"""Worlds, in messages: they know no tokens and no torch."""
