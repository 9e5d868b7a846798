"""Training for HTTP clients: the operations on one model, in order."""
