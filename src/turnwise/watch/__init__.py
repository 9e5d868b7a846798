"""What a run shows and which commands it obeys: status, deadlines, steering, alarms, metrics, loggers, terminal."""
