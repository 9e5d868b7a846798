"""`turnwise compare`: a grid of methods, worlds and seeds, run side by side, and what the runs say together."""
