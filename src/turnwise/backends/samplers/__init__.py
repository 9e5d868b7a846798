"""The engine itself as a fleet of samplers: `cluster.samplers` and `cluster.placement`."""
