"""One module per speed figure in docs/results.md: each runs our engine and a peer in the same run, and prints ratios."""
