"""What every room may use: event loops, calls that are under way, settings of the process."""
