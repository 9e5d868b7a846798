"""`turnwise compare`: run a grid of methods, worlds and seeds, and compare the results."""
