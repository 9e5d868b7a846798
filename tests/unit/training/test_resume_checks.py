"""What a resumed run refuses to change, by name and before anything is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.config.config import Config
from turnwise.config.files import config_to_yaml
from turnwise.errors import ConfigError
from turnwise.runlog.writer import RunWriter
from turnwise.training.setup import check_critic, check_overrides


def test_a_resumed_run_keeps_its_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one would go on without the value pre-training that it needs, and the stored config would be untrue."""
    RunWriter.create(tmp_path / "run", config_to_yaml(Config()), max_size_mb=1).close()
    for text in ("method=ppo", "method.name=ppo"):
        assert main(["train", "--resume", str(tmp_path / "run"), text, "--plan"]) == 2
        assert f"{text}: a resumed run keeps its method, grpo" in capsys.readouterr().err
    for text in ("method=grpo", "method.gamma=0.9", "train.steps=80"):
        check_overrides(Config(), [text])
    with pytest.raises(ConfigError, match=r"env=key_door: a resumed run keeps its model, env, memory, warmup"):
        check_overrides(Config(), ["env=key_door"])


def test_options_of_the_critic_that_come_too_late_are_refused() -> None:
    def config(**critic: object) -> Config:
        return Config.model_validate({"method": {"name": "ppo"}, "critic": critic})

    def check(changed: Config, num_steps_done: int, *, has_critic: bool = True) -> None:
        check_critic(config(), changed, num_steps_done=num_steps_done, has_critic=has_critic)

    with pytest.raises(ConfigError, match=r"critic\.pretrain_steps is not read any more: .* of the 3 steps"):
        check(config(pretrain_steps=80), 3)
    with pytest.raises(ConfigError, match=r"critic\.rank: the run's critic is there"):
        check(config(rank=4), 0)
    check(config(pretrain_steps=80), 0)
    check(config(rank=4), 0, has_critic=False)
    check(config(updates=2), 3)
