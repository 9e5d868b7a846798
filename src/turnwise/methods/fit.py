"""What a method does not go together with, outside its own section of a config: each question has a reason or None."""

from __future__ import annotations

from turnwise.methods.config import BRANCHING_METHODS, METHOD_OPTIONS, READING_METHODS, MethodConfig


def why_not_own_worlds(method: MethodConfig) -> str | None:
    """Why the attempts at a task have to start in the same world (`rollout.same_start`)."""
    if method.name in BRANCHING_METHODS:
        return "continues one dialogue several times, and a dialogue has one world"
    if method.name in READING_METHODS:
        return "reads stored data: no attempt is played that could start anywhere; leave it out"
    if method.name == "dpo":
        return "prefers one attempt to another, and between two worlds it would prefer the luckier one"
    return None


def why_not_so_many(method: MethodConfig, num_attempts: int) -> str | None:
    """Why a task cannot have that many attempts (`rollout.group_size`)."""
    if method.name == "refuel" and num_attempts % 2:
        return "pairs the continuations of a dialogue two by two, and one would be left over; expected an even number"
    return None


def why_not_potential(method: MethodConfig) -> str | None:
    """Why potentials (`reward.potential`) would change what the method aims at.

    They add up to -phi(s_0) over an attempt, and from turn k on to -phi(s_k): the same for everything that is compared,
    in a method that compares returns. These do something else with rewards.
    """
    if method.name == "mt_grpo":
        return (
            "takes the reward of the last turn for the outcome: with potentials that is r - phi(s_last), and every "
            "turn would pay for a good state before the end"
        )
    if "advantage" in METHOD_OPTIONS[method.name] and method.chosen("advantage") == "max_rl":
        return "(advantage: max_rl) divides by the mean return, which potentials lower by phi(s_0)"
    if method.name == "rft":
        return "holds returns against a bound, and potentials lower them by phi(s_0)"
    return None
