"""Works out sums that are written as text."""
