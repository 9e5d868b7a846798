"""What every room may use: event loops, pending calls, process settings, config sections, suggestions."""
