"""What a run shows and obeys: status, deadlines, steering, alarms, metrics, loggers, the terminal."""
