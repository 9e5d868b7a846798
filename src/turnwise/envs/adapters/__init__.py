"""Adapters that run other libraries' envs as turnwise worlds."""
