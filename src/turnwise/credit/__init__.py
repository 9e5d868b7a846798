"""Who deserves what: arithmetic on trajectories. numpy at most, no I/O."""
