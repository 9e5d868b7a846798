"""Hand-written kernels, one file per device; the engine works without them, only slower."""
