"""Credit assignment: which turns and tokens earned the reward. Arithmetic on trajectories, with numpy and without
I/O."""
