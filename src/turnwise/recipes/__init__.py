"""Complete scripts to read, run and copy. Nothing imports them."""
