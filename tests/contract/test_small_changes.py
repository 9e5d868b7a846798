"""Changes that take one file or two: a world from outside the package, an option that shapes rewards, a metric.

(An end reason: `tests/unit/test_trajectory.py`.)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from turnwise.config.files import load_config
from turnwise.envs.check import check_env
from turnwise.envs.registry import get_world
from turnwise.renderers import get_renderer
from turnwise.rollout import RolloutConfig, play_groups
from unit.rollout.worlds import saying

MY_WORLD = '''
from turnwise.envs.base import EnvStep, user

class Echo:
    """The policy should repeat a word."""

    def __init__(self, seed: int, word: str = "yes") -> None:
        self.word = word
        self.number = seed % 100

    async def start(self):
        return [user(f"{self.number}: say {self.word}.")]

    async def step(self, reply):
        return EnvStep(reward=float(self.word in reply.content), terminated=True)

    async def close(self):
        pass
'''


async def test_a_world_is_one_file_outside_the_package(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_module.py").write_text(MY_WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config("my_module:Echo", ["env.options.word=blue"])
    world = get_world(config.env.name, **config.env.options)
    loader: Any = AutoTokenizer
    renderer = get_renderer(loader.from_pretrained(str(tiny_dir)))
    tasks = world.tasks("train", 2, 0)
    played = await play_groups(world, tasks, saying(renderer, "blue"), renderer, RolloutConfig(group_size=2), seed=0)
    assert [group.rewards for group in played.groups] == [[1.0, 1.0]] * 2


def test_a_world_from_outside_passes_the_same_checks_as_a_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "my_module.py"
    file.write_text(MY_WORLD)
    report = check_env(get_world(f"{file}:Echo"))
    assert not report.failed, str(report)


EDIT = """
import importlib.util, pathlib, sys
import turnwise

def edit(name, *lines):
    '''Load the module `turnwise.NAME` with lines put before lines that are there.'''
    path = pathlib.Path(turnwise.__file__).parent.joinpath(*name.split(".")).with_suffix(".py")
    text = path.read_text()
    for marker, line in lines:
        assert text.count(marker) == 1, marker
        text = text.replace(marker, line + chr(10) + marker)
    spec = importlib.util.spec_from_file_location(f"turnwise.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"turnwise.{name}"] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
"""

SHAPING_WITH_A_BONUS = (
    EDIT
    + """
edit(
    "credit.shaping",
    (
        "    potential: bool = Field(",
        '    turn_bonus: float = Field(default=0.0, description="Added to the reward of every turn.")',
    ),
    (
        "    if reward.potential:",
        "    for own in parts: own['shaping'] = own.get('shaping', 0.0) + reward.turn_bonus",
    ),
)
from turnwise.config.files import load_config
from turnwise.credit.shaping import Shaping, shape_group
from turnwise.trajectory import EndReason, Message, Trajectory, TrajectoryGroup, Turn

config = load_config("guess_number", ["reward.turn_bonus=0.25"])
reply = Message(role="assistant", content="hi")
turn = Turn(prompt_ids=(1,), sampled_ids=(2,), sampler_logprobs=(-1.0,), policy_version=0, reply=reply)
attempt = Trajectory(task_id="t", attempt=0, seed=0, turns=(turn, turn), end_reason=EndReason.TERMINATED)
shaped = shape_group(TrajectoryGroup(task_id="t", trajectories=(attempt,)), Shaping(reward=config.reward))
assert list(shaped.rewards) == [0.5]
"""
)


METRIC_OF_SHORT_ATTEMPTS = (
    EDIT
    + """
edit(
    "watch.catalogue",
    (
        '        ("rollout/turns_mean", ',
        '        ("rollout/turns_min", "turns", "Turns of the shortest attempt."),',
    ),
)
edit(
    "rollout.stats",
    (
        '        values["attempts_kept"] = ',
        '        if self.kept: values["turns_min"] = float(min(len(one.turns) for one in self.kept))',
    ),
)

from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import EndReason, Message, Trajectory, Turn
from turnwise.watch.catalogue import check_names, metrics_page

reply = Message(role="assistant", content="hi")
turn = Turn(prompt_ids=(1,), sampled_ids=(2,), sampler_logprobs=(-1.0,), policy_version=0, reply=reply)
stats = RolloutStats()
for count in (2, 3):
    stats.kept.append(
        Trajectory(task_id="t", attempt=0, seed=0, turns=(turn,) * count, end_reason=EndReason.TERMINATED)
    )
metrics = stats.metrics()
check_names(metrics)
assert metrics["rollout/turns_min"] == 2
assert "`rollout/turns_min`" in metrics_page()
"""
)


def _run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_option_that_shapes_rewards_is_a_field_and_a_rule_in_one_file() -> None:
    _run(SHAPING_WITH_A_BONUS)


def test_a_metric_is_computed_in_one_file_and_described_in_another() -> None:
    _run(METRIC_OF_SHORT_ATTEMPTS)
