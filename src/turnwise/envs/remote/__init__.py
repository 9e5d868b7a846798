"""Worlds that other processes play: their client, and the JSON that both sides speak."""
