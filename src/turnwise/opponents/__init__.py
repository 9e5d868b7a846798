"""Who plays the other seat of a world with two sides: models in this process, models at an address, and a pool."""
