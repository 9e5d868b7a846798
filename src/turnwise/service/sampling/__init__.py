"""Sampling for HTTP clients."""
