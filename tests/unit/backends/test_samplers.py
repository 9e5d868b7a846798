from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.backends import BackendSetup, make_publisher
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.errors import TurnwiseError
from turnwise.rollout.config import RolloutConfig
from turnwise.runtime.blocking import run_to_end


def test_a_sampler_that_cannot_load_its_model_is_told_as_one_error(tmp_path: Path) -> None:
    publisher = make_publisher(
        BackendSetup(
            rollout=RolloutConfig(),
            model_directory=tmp_path / "nothing",
            run_directory=tmp_path,
            engine=EngineConfig(device="cpu"),
            cluster=ClusterConfig(placement="separate"),
        )
    )
    try:
        with pytest.raises(TurnwiseError, match="nothing"):
            run_to_end(publisher.serve(None))
    finally:
        run_to_end(publisher.close())
