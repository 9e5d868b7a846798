"""Plays a policy in a world: attempts, groups of attempts, and what went wrong with them."""

from turnwise.rollout.config import RolloutConfig as RolloutConfig
from turnwise.rollout.group import DroppedGroup as DroppedGroup
from turnwise.rollout.group import Rollout as Rollout
from turnwise.rollout.group import RolloutResult as RolloutResult
from turnwise.rollout.group import play_groups as play_groups
from turnwise.rollout.limits import RolloutLimits as RolloutLimits
