"""Agent memory for any world: a window of full turns, summaries that the policy writes itself, and notes."""
