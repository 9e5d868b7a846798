"""One module per speed figure in docs/results.md: each measures our engine and a peer in one run, and prints ratios."""
