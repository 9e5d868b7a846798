from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import run_here
from turnwise.commands.cluster import parse_card
from turnwise.engine.budget import GIB, format_bytes, split_memory
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.engine.samplers.launcher import SamplerLauncher
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError
from turnwise.judges.judge import Judge
from turnwise.judges.models import AddressModel
from turnwise.judges.rubric import Rubric
from turnwise.judges.world import JudgedWorld
from turnwise.models.experts import ExpertSpec
from turnwise.models.facts import read_facts
from turnwise.training.cluster_plan import cluster_lines, estimate_traffic, make_card
from turnwise.training.memory import check_sharded
from turnwise.training.setup import Setup, read_config, set_up_new
from turnwise.training.trainer_engine import TRAINER_CACHE_GIB, trainer_engine


def _setup(*overrides: str) -> Setup:
    return set_up_new(read_config("guess_number", ["model=tiny", "eval.tasks=0", *overrides]))


@pytest.mark.usefixtures("tiny_dir")
def test_the_traffic_of_gradients_is_that_of_a_ring_over_what_is_trained() -> None:
    for count in (1, 2, 8):
        setup = _setup("model.train=full", f"cluster.learners={count}")
        trained = 4 * setup.facts.num_parameters
        traffic = estimate_traffic(setup, setup.make_plan())
        assert traffic.gradients == 2 * trained * (count - 1) // count
        assert traffic.state == (3 * trained if count > 1 else 0)
    adapter = _setup("cluster.learners=2")
    critic = _setup("cluster.learners=2", "method=ppo", "train.substeps=2")
    sent = [estimate_traffic(one, one.make_plan()).gradients for one in (adapter, critic)]
    assert sent[1] > 2 * sent[0], "two optimizer steps, and the critic's gradient too"


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_names_every_process() -> None:
    lines = cluster_lines(_setup("cluster.learners=3", "cluster.env_workers=2"))
    assert sum(line.startswith("learner ") for line in lines) == 3
    assert sum(line.startswith("env worker ") for line in lines) == 2
    printed = run_here("cluster", "plan", "guess_number", "model=tiny", "cluster.learners=2")
    assert "learner 1    a process of this machine" in printed
    own = _setup("cluster.placement=separate", "cluster.samplers=2")
    lines = [*own.plan_lines(), *cluster_lines(own)]
    assert "samplers     2 processes of their own on this machine, each with the whole model" in lines
    assert sum(line.startswith("sampler ") for line in lines) == 2
    assert any(line.startswith("  publish") and line.endswith("to each sampler, 2 of them") for line in lines)


@pytest.mark.usefixtures("tiny_dir")
def test_a_trainer_has_room_for_sampling_only_where_something_samples_on_it() -> None:
    separate, servers = ("cluster.placement=separate",), ("rollout.backend=sglang", "rollout.url=http://127.0.0.1:1")
    for given in (separate, servers):
        own = _setup(*given)
        assert (own.trainer_engine.kv_cache_gib, own.trainer_engine.merge_adapter) == (TRAINER_CACHE_GIB, "never")
    played = read_config("negotiate", ["model=tiny", "eval.tasks=0", *separate, "env.options.opponent=base"])
    for own in (_setup(), set_up_new(played)):
        assert own.trainer_engine == own.config.engine_in_use
    chosen = _setup(*separate, "engine.kv_cache_gib=0.5", "engine.merge_adapter=always").trainer_engine
    assert (chosen.kv_cache_gib, chosen.merge_adapter) == (0.5, "always")
    judge = Judge(AddressModel(base_url="http://127.0.0.1:1", model="m"), Rubric(criteria="Any."))
    judged = JudgedWorld(inner=get_world("guess_number"), judge=judge)
    assert trainer_engine(_setup(*separate).config, judged).kv_cache_gib == 0
    own = _setup(*separate)
    trainer, sampler = own.make_plan().memory, own.make_plan(own.config.engine_in_use).memory
    assert trainer is not None
    assert sampler is not None
    assert trainer.kv_cache < sampler.kv_cache
    assert trainer.merged == 0 < sampler.merged
    lines = cluster_lines(own)
    assert lines[0].endswith(f": {format_bytes(trainer.total)}")
    assert lines[1].endswith(
        f": {format_bytes(sampler.weights + sampler.merged + sampler.kv_cache)} and published weights"
    )


def test_a_sampler_of_all_weights_leaves_no_room_for_training_them(tiny_dir: Path) -> None:
    given = EngineConfig(device="cpu", full_weights=True)
    own = SamplerLauncher(ClusterConfig(placement="separate"), given).engine_of(0)
    card = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=110 * GIB, total_bytes=141 * GIB)
    trainer, sampler = (
        split_memory(
            one, card, read_facts(tiny_dir), adapted_parameters=0, context_length=4096, num_parameters=8_190_000_000
        )
        for one in (given, own)
    )
    assert trainer.kv_tokens == 0 < sampler.kv_tokens


@pytest.mark.usefixtures("tiny_dir")
def test_learners_with_parts_of_the_weights_are_planned_with_a_part_each() -> None:
    full = ("model.train=full", "cluster.learners=2")
    whole, parts = (_setup(*full, *more).make_plan().memory for more in ((), ("cluster.shard=true",)))
    assert whole is not None
    assert parts is not None
    assert (parts.weights, parts.adapter) == (whole.weights // 2, whole.adapter // 2)
    assert parts.gathered > 0 == whole.gathered
    setup = _setup(*full, "cluster.shard=true")
    traffic = estimate_traffic(setup, setup.make_plan())
    assert traffic.gathered == 2 * 4 * setup.facts.num_parameters // 2
    assert (traffic.gradients, traffic.state) == (0, 0), "nobody has a copy of another one's part"
    printed = "\n".join([*setup.plan_lines(), *cluster_lines(setup)])
    assert "2 processes on this machine, each with 1/2 of the weights" in printed
    assert "to each learner in every training pass" in printed


@pytest.mark.usefixtures("tiny_dir")
def test_what_weights_in_parts_do_not_read_is_refused_by_name() -> None:
    shard = ("cluster.learners=2", "cluster.shard=true")
    for given, said in (
        (("cluster.shard=true",), r"shard=true is not read with learners=1"),
        ((*shard, "cluster.min_learners=1"), r"min_learners=1 with shard=true"),
        ((*shard, "engine.merge_adapter=always"), r"engine\.merge_adapter=always with cluster\.shard=true"),
        ((*shard, "model.train=full", "cluster.max_restarts=1"), r"cluster\.max_restarts=1 is not read"),
    ):
        with pytest.raises(ConfigError, match=said):
            _setup(*given)


@pytest.mark.usefixtures("tiny_dir")
def test_a_sampler_on_a_gpu_and_models_without_our_dense_layers_are_refused_with_weights_in_parts() -> None:
    setup = _setup("cluster.learners=2", "cluster.shard=true")
    gpu = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=1 << 40, total_bytes=1 << 40)
    with pytest.raises(ConfigError, match=r"backend=vllm or sglang with rollout\.tensor_parallel_size"):
        check_sharded(setup.config, setup.facts, gpu)
    with pytest.raises(ConfigError, match="runs transformers' layers"):
        check_sharded(setup.config, replace(setup.facts, block=None), gpu)
    experts = ExpertSpec(num_experts=4, num_chosen=2, inner_size=8)
    with pytest.raises(ConfigError, match="routes tokens to experts"):
        check_sharded(setup.config, replace(setup.facts, experts=experts), gpu)


@pytest.mark.usefixtures("tiny_dir")
def test_a_laptop_plans_for_cards_that_it_does_not_have() -> None:
    options = ("model=tiny", "cluster.learners=8", "cluster.shard=true", "cluster.placement=separate", "eval.tasks=0")
    printed = run_here("cluster", "plan", "guess_number", *options, "--card", "80")
    assert re.search(r"^learner 7 +a process of this machine, a card of 80\.00 GiB: ", printed, re.MULTILINE)
    assert re.search(r"^sampler 0 +a process of this machine, a card of 80\.00 GiB: ", printed, re.MULTILINE)
    assert "of 80.00 GiB on the GPU in bfloat16, in each of 8 learners" in printed
    with pytest.raises(argparse.ArgumentTypeError, match="expected GiB of a GPU"):
        parse_card("-1")
    with pytest.raises(ConfigError, match=r"the GPU has free .* MiB"):
        replace(_setup(*options[:2]), card=make_card(0.001, "auto")).make_plan()


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_of_weights_in_parts_says_what_a_step_gathers() -> None:
    setup = _setup("model.train=full", "cluster.learners=2", "cluster.shard=true", "engine.micro_batch_tokens=512")
    traffic, memory = estimate_traffic(setup, setup.make_plan()), setup.make_plan().memory
    assert memory is not None
    rollout, train = setup.parts.rollout, setup.config.train
    longest = min(rollout.max_trajectory_tokens, 2 * rollout.max_turns * rollout.max_tokens_per_turn)
    tokens = train.tasks_per_step * rollout.group_size * longest
    assert traffic.passes == -(-tokens // (2 * memory.num_pass_tokens)) > 1
    each = traffic.gathered + traffic.pass_gradients
    assert f"at least {traffic.passes:,} passes a step: {format_bytes(traffic.passes * each)}" in "\n".join(
        cluster_lines(setup)
    )
