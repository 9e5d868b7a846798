"""Outcome models: they say how probable it is that a whole attempt succeeded.

labelled.py        attempts with a verifier's verdict, and which of them are held out
measure.py         accuracy, F1 and calibration of scores
model.py           a trained outcome model: a value head, or a model that writes a reason and a verdict
verdict_world.py   the world in which the second kind is trained
world.py           adds an outcome model's score to any world's reward
pairwise.py        compares the attempts of a group two by two
"""

from turnwise.outcomes.labelled import LabelledAttempt
from turnwise.outcomes.model import OutcomeModel, open_outcome_model
from turnwise.outcomes.world import OutcomeWorld, attach_outcome_model, has_outcome_model

__all__ = [
    "LabelledAttempt",
    "OutcomeModel",
    "OutcomeWorld",
    "attach_outcome_model",
    "has_outcome_model",
    "open_outcome_model",
]
