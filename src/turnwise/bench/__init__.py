"""One module per figure in the README: each runs our engine and a peer in the same run and reports ratios."""
