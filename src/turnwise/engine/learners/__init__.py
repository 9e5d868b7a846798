"""Several processes that train one model together: shares of a batch, the processes, and the engine that leads them."""
