"""What everything above the engine talks to: Tinker's clients, in process."""
