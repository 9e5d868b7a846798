"""Judges: a model scores a finished attempt by a rubric, as a separate part of the reward.

rubric.py     what the judge is asked, and how its answer is read
models.py     the model that is asked: an OpenAI-compatible address, a sampler of ours, or a model by name
cache.py      stores answers
judge.py      asks within limits, and decides what happens without a score
world.py      adds a judge to any world

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
