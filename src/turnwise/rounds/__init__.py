"""Rounds of play, verdict, routing, training and evaluation: `turnwise.flywheel`."""
