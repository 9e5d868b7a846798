"""Walking on grids that are written as lines of text: # is a wall."""
