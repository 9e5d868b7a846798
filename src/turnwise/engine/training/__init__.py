"""Datums to gradients: packing, logprobs, losses, the optimizer, and adapters on disk."""
