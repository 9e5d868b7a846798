"""The one training loop, its config, and what surrounds it: plan, evaluation, checkpoints, the live view."""
