"""One machine as a Tinker-compatible service: `turnwise serve`, the wire, the queues and what survives a restart."""
