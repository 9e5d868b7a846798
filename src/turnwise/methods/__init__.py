"""One small file per method: which groups it keeps, what each turn deserves, and the loss that makes use of it."""
