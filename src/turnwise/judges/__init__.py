"""Judges: a model scores a finished attempt by a rubric, in a reward channel of its own.

rubric.py     what the judge is asked, and how its answer is read
models.py     who is asked: an OpenAI-compatible address, a sampler of ours, or a model by its name
cache.py      answers that were given before
judge.py      asks within limits; says what happens when no score comes
world.py      any world, with a judge after its own reward

judged_world = judged(get_world("search"), judge)
turnwise train turnwise.judges:judged_by_model env.options.world=search env.options.model=... (docs/judges.md)
"""

from turnwise.judges.judge import Judge, JudgeLimits, Verdict
from turnwise.judges.models import AddressModel, EmbeddedModel, JudgeModel, SamplerModel
from turnwise.judges.rubric import Rubric
from turnwise.judges.world import JudgedWorld, attach_judge, judged, judged_by_model, needs_service

__all__ = [
    "AddressModel",
    "EmbeddedModel",
    "Judge",
    "JudgeLimits",
    "JudgeModel",
    "JudgedWorld",
    "Rubric",
    "SamplerModel",
    "Verdict",
    "attach_judge",
    "judged",
    "judged_by_model",
    "needs_service",
]
