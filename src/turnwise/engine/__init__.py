"""The embedded engine: owns the device, the weights, the gradients and the KV cache. torch lives here.

`engine.py` is the facade; everything above talks to it through `worker.py`, the one thread that owns an engine.
"""
