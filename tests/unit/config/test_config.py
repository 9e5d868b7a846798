"""What can be told to a run, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import turnwise
from skyrl_guide import BASIC_MULTI_TURN
from turnwise.config.config import Config
from turnwise.config.files import (
    config_from_yaml,
    config_to_yaml,
    load_config,
    option_paths,
    override_config,
    parse_yaml,
    preset_names,
    tree_to_config,
)
from turnwise.config.spellings import canonical_option
from turnwise.credit.shaping import RewardWeights
from turnwise.engine.training.losses import make_loss
from turnwise.envs.registry import ADAPTERS, world_names
from turnwise.errors import ConfigError
from turnwise.losses.table import CORRECTION_BOUNDS, LOSSES, policy_losses
from turnwise.methods.lookup import SHIPPED, read_method
from turnwise.rollout.config import RolloutConfig
from turnwise.trajectory import REWARD_PARTS

SGLANG_REQUIREMENT = """\
generator:
  backend: sglang
  use_conversation_multi_turn: true  # SGLang REQUIRES this
"""
MAX_TURNS = """\
generator:
  max_turns: 5  # Adjust based on task complexity
"""
MULTI_TURN_FIX = """\
generator:
  use_conversation_multi_turn: true
"""
MEMORY_FIX = """\
generator:
  gpu_memory_utilization: 0.7  # Lower to leave headroom
  max_num_seqs: 256            # Reduce concurrent sequences
"""


LEGAL = {
    "clip_low_threshold": 0.5,
    "clip_high_threshold": 1.5,
    "dual_clip": 3.0,
    "beta": 0.1,
    "tv_threshold": 0.1,
    "tv_penalty": 0.0,
}


def _message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("guess_number", overrides)
    return str(caught.value)


@pytest.mark.parametrize("text", [BASIC_MULTI_TURN, SGLANG_REQUIREMENT, MAX_TURNS, MULTI_TURN_FIX, MEMORY_FIX])
def test_the_guides_snippets_load_unchanged(text: str, tmp_path: Path) -> None:
    file = tmp_path / "guide.yaml"
    file.write_text(text, encoding="utf-8")
    config = load_config(str(file))
    for key, value in yaml.safe_load(text)["generator"].items():
        if key != "sampling_params":
            section, _, option = canonical_option(f"generator.{key}").partition(".")
            assert getattr(getattr(config, section), option) == value


def test_the_guides_sampling_params_arrive() -> None:
    config = tree_to_config(parse_yaml(BASIC_MULTI_TURN, "guide"))
    assert (config.rollout.max_turns, config.rollout.max_tokens_per_turn) == (5, 1024)


def test_sglang_without_multi_turn_raises_the_error_that_the_guide_quotes() -> None:
    with pytest.raises(NotImplementedError) as caught:
        load_config("guess_number", ["generator.backend=sglang", "generator.use_conversation_multi_turn=false"])
    assert type(caught.value) is NotImplementedError
    assert str(caught.value) == "`use_conversation_multi_turn=False` is not supported for SGLang backend"
    for backend in ("vllm", "local"):
        load_config("guess_number", [f"generator.backend={backend}", "generator.use_conversation_multi_turn=false"])
    with pytest.raises(NotImplementedError, match="SGLang backend"):
        turnwise.train("guess_number", rollout={"backend": "sglang", "use_conversation_multi_turn": False})


def test_what_a_server_cannot_promise_is_refused() -> None:
    for backend in ("sglang", "vllm"):
        with pytest.raises(ConfigError, match=f"deterministic is not read with backend={backend}"):
            load_config("guess_number", [f"rollout.backend={backend}", "rollout.deterministic=true"])


def test_guesses_are_refused_where_nobody_makes_them_and_where_they_would_change_bits() -> None:
    guess = "engine.speculation=suffix"
    assert load_config("guess_number", [guess]).engine_in_use.speculation == "suffix"
    with pytest.raises(ConfigError, match=r"speculation=suffix is not read with rollout\.backend=vllm"):
        load_config("guess_number", [guess, "rollout.backend=vllm"])
    with pytest.raises(ConfigError, match=r"speculation=suffix with rollout\.deterministic"):
        load_config("guess_number", [guess, "rollout.deterministic=true"])


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_is_parsed(name: str) -> None:
    env = load_config(name).env
    for world in (env.mix or {name: env}).values():
        known = ADAPTERS if ":" in world.name else world_names()
        assert world.name.partition(":")[0] in known


def test_every_world_has_a_preset() -> None:
    assert set(preset_names()) >= set(world_names())


def test_a_world_without_a_preset_is_a_name_too() -> None:
    assert load_config("my_module:MyWorld").env.name == "my_module:MyWorld"


def test_overrides_are_yaml_and_short_forms_name_sections() -> None:
    config = load_config(
        "calculator",
        [
            "model=tiny",
            "method=grpo",
            "env=guess_number",
            "train.learning_rate=1e-5",
            "rollout.temperature=0.5",
            "run.loggers=[wandb, trackio]",
            "run.name=7",
            "env.options.decay=1e-3",
            "env.options.rubric=@rubric.txt",
        ],
    )
    assert (config.model.name, config.method.name, config.env.name) == ("tiny", "grpo", "guess_number")
    assert config.train.learning_rate == 1e-5
    assert config.rollout.temperature == 0.5
    assert config.run.loggers == ("wandb", "trackio")
    assert config.run.name == "7"
    assert config.env.options == {"decay": 0.001, "rubric": "@rubric.txt"}


def test_a_bare_name_stands_for_a_section_in_files_too(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: tiny\nenv: key_door\ntrain:\n", encoding="utf-8")
    config = load_config(str(file), ["model.rank=4"])
    assert (config.model.name, config.model.rank, config.env.name) == ("tiny", 4, "key_door")


def test_the_written_config_loads_to_the_same_config() -> None:
    for name in preset_names():
        config = load_config(name, ["run.dir=x"])
        assert config_from_yaml(config_to_yaml(config), "run") == config
        assert override_config(config, []) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stepz=1", "train.stepz is not an option; did you mean train.steps?"),
        ("rollout.temprature=1", "did you mean rollout.temperature?"),
        ("generator.max_generate_length=8", "did you mean rollout.max_tokens_per_turn?"),
        ("rollout.n_samples_per_prompt=8", "did you mean rollout.group_size?"),
        ("trainer.learning_rate=1", "trainer is not an option; did you mean train"),
        ("steps=3", "did you mean train.steps?"),
        ("env.high=9", "a world's own options go under env.options"),
        ("train.steps", "expected section.key=value"),
        ("train.steps=-1", "train.steps=-1: input should be greater than or equal to 0"),
        ("train.steps=many", "train.steps='many'"),
        ("train.steps=[", "not valid YAML"),
        ("method=gpro", "method.name='gpro': there is no such method; expected grpo, gspo"),
        ("method=nix", "a method of your own is module:Class or path/to/file.py:Class"),
        ("loss=cisp", "a loss of your own is module:function or path/to/file.py:function; did you mean cispo?"),
        ("method=gigpoo", "did you mean gigpo?"),
        ("train=3", "'train=3': train is a section; expected train.KEY=value, such as train.steps"),
        ("reward.weight.outcome=1", "did you mean reward.weights?"),
        ("model.name.x=1", "model.name={'x': 1}: input should be a valid string"),
    ],
)
def test_a_mistake_is_named_with_the_nearest_valid_option(override: str, expected: str) -> None:
    assert expected in _message(override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["method.clip_low_threshold=0.8"], "not read by loss_fn=importance_sampling, only by ppo, cispo, gspo"),
        (["method.loss_fn=cispo", "method.beta=0.1"], "only by dro"),
        (["method.gamma=0.9"], "gamma=0.9 is not read by credit=trajectory"),
        (["method.kl_estimator=k3"], "not read while kl_coef is 0"),
        (["method.kl_place=loss"], "not read while kl_coef is 0"),
        (["method.kl_coef=0.1", "method.kl_estimator=k3"], "not read by kl_place=advantages; set kl_place: loss"),
        (["method.kl_coef=0.1", "method.kl_place=loss", "method.kl_gamma=0.9"], "set kl_place: advantages"),
        (["rollout.on_unparsable=end", "rollout.unparsable_penalty=1"], "not read with on_unparsable=end"),
        (["rollout.renderer=template", "rollout.strip_thinking=true"], "strip_thinking"),
        (["run.project=mine"], "read by wandb and trackio only"),
        (["eval.tasks=0", "eval.every=5"], "every=5 is not read while eval.tasks is 0"),
        (["eval.tasks=0", "eval.temperature=0.5"], "temperature=0.5 is not read while eval.tasks is 0"),
        (["alarms.max_stale_share=0.5"], "alarms.max_stale_share=0.5 is not read while train.max_staleness is 0"),
        (["method=gigpo", "method.omega=0", "method.gamma=0.9"], "method.gamma=0.9 is not read while method.omega"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(overrides: list[str], expected: str) -> None:
    assert expected in _message(*overrides)


def test_warmup_options_without_steps_are_refused_but_steps_zero_turns_it_off() -> None:
    with pytest.raises(ValidationError, match=r"set warmup\.steps"):
        Config.model_validate({"warmup": {"batch_size": 4}})
    assert load_config("guess_number", ["warmup.steps=0"]).warmup.steps == 0


@pytest.mark.parametrize(
    "override",
    [
        "generator.sampling_params.top_p=0.9",
        "generator.sampling_params.top_k=40",
        "rollout.min_group_size=9",
        "rollout.min_group_size=1",
        "rollout.temperature=0",
        "train.substeps=99",
        "run.name=a/b",
    ],
)
def test_what_cannot_work_is_refused(override: str) -> None:
    assert _message(override)


def test_all_mistakes_are_listed_at_once() -> None:
    message = _message("train.steps=-1", "train.seed=-1", "run.nme=x")
    assert message.startswith("the config has mistakes:")
    assert len(message.splitlines()) == 4


def test_a_key_that_comes_twice_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train:\n  steps: 1\n  steps: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'steps' comes twice"):
        load_config(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / "no.yaml"))


def test_the_bounds_of_masks_are_the_engines_and_hold_what_was_drawn_on_policy() -> None:
    for correction, bounds in CORRECTION_BOUNDS.items():
        if not correction.endswith("mask"):
            continue
        config = make_loss("ppo", {"correction": correction}).config
        assert config.correction_bounds == bounds
        for impossible in ({"correction_low": 3}, {"correction_high": 0.4}, {"correction_low": 1.2}):
            with pytest.raises(ValidationError, match="expected correction_low <= 1 <= correction_high"):
                read_method({"correction": correction, **impossible})
        read_method({"correction": correction, "correction_low": 0.1, "correction_high": 1})


def test_numbers_that_the_loss_would_refuse_after_the_first_batch_are_refused() -> None:
    assert "beta=0" in _message("method=dpo", "method.beta=0")
    assert "finite" in _message("method.correction=token_mask", "method.correction_high=.inf")
    assert "finite" in _message("train.learning_rate=.nan")
    assert load_config("guess_number", ["method.loss_fn=dro", "method.beta=0"]).method.beta == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["method.loss_fn=ppo", "method.clip_low_threshold=1.3"],
        ["method.loss_fn=cispo", "method.clip_low_threshold=2", "method.clip_high_threshold=1"],
        ["method.loss_fn=ppo", "method.dual_clip=0.5"],
    ],
)
def test_bounds_out_of_order_are_refused_before_anything_is_spent(overrides: list[str]) -> None:
    assert "expected" in _message(*overrides)


@pytest.mark.parametrize("loss_fn", policy_losses())
def test_the_loss_config_of_every_loss_is_taken_by_the_engine(loss_fn: str) -> None:
    values = {option: LEGAL[option] for option in LOSSES[loss_fn].own_options}
    shared = {"kl_coef": 0.1, "kl_place": "loss", "entropy_coef": 0.01}
    method = read_method({"loss_fn": loss_fn, **values, **shared})
    config = make_loss(loss_fn, method.loss_config).config
    assert (config.kl_coef, config.entropy_coef, config.kl_estimator) == (0.1, 0.01, "k2")
    assert read_method({"loss_fn": loss_fn}).loss_config == {}


def test_a_bound_of_zero_is_a_bound() -> None:
    method = read_method({"loss_fn": "ppo", "clip_low_threshold": 0})
    assert method.loss_config == {"clip_low_threshold": 0.0}


def test_every_option_has_a_description() -> None:
    from turnwise.config.reference import options

    assert [option.path for option in options()] == list(option_paths())
    assert all(option.description.endswith(".") for option in options())


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RolloutConfig().max_turns = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_config_loads_without_torch() -> None:
    code = "import sys, turnwise.config.files; print('torch' in sys.modules or 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_what_the_command_line_says_itself_is_never_left_behind() -> None:
    for overrides in (["method=mt_grpo", "method.gamma=0.5"], ["method.gamma=0.5", "method=mt_grpo"]):
        with pytest.raises(ConfigError, match="gamma is not read by method=mt_grpo"):
            load_config("key_door", overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["method.omega=1"], "omega is not read by method=grpo, only by gigpo"),
        (["method=rft", "method.kl_coef=0.1"], "kl_coef is not read by cross_entropy, the loss of method=rft"),
        (["method=gspo", "method.loss_fn=ppo"], "loss_fn is not read by method=gspo"),
        (["method.correction=token_tis"], "would be corrected twice; set old_policy: true, or use a mask"),
        (["method.old_policy_from=loglinear"], "old_policy_from=loglinear is not read while old_policy is false"),
        (
            ["method.old_policy=true", "method.old_policy_from=loglinear"],
            "method.old_policy_from=loglinear is not read while train.max_staleness is 0",
        ),
        (["method.correction_low=0.5"], "correction_low=0.5 is not read by correction='none'"),
        (["data.dialogues=x"], "data.dialogues is not read by method=grpo, only by sft"),
        (["reward.length_buffer=3"], "not read while max_length is 0"),
        (["reward.max_length=3", "reward.length_buffer=4"], "length_buffer=4 is more than max_length=3"),
    ],
)
def test_options_of_methods_losses_and_rewards_that_nothing_reads_are_refused(
    overrides: list[str], expected: str
) -> None:
    assert expected in _message(*overrides)


def test_a_null_takes_the_default_of_the_method_whose_option_it_is() -> None:
    at_rest = {"kl_coef": 0.0, "kl_place": "advantages", "kl_estimator": "k2", "entropy_coef": 0.0}
    at_rest |= {"old_policy": False, "old_policy_from": "forward", "correction": "none", "opsm_threshold": 0.0}
    for name, options in SHIPPED.items():
        nulls = {option: None for shipped in SHIPPED.values() for option in shipped.model_fields if option != "name"}
        assert read_method({"name": name, **nulls}) == options()
        old = options.model_validate({"correction": "none"}) if "correction" in options.model_fields else options()
        assert read_method({"name": name, **nulls, **at_rest}) == old, "as older runs wrote them down"
    assert (read_method("gspo").normalisation, read_method("rebn").gamma, read_method("grpo").gamma) == (
        "seq_mean",
        0.95,
        1.0,
    )


def test_every_reward_channel_has_a_weight() -> None:
    assert tuple(RewardWeights.model_fields) == REWARD_PARTS


def test_corrections_reach_the_engine() -> None:
    given = {
        "loss_fn": "ppo",
        "old_policy": True,
        "correction": "token_tis",
        "correction_high": 3,
        "opsm_threshold": 1e-4,
    }
    config = make_loss("ppo", read_method(given).loss_config).config
    assert (config.correction, config.correction_high, config.opsm_threshold) == ("token_tis", 3, 1e-4)


def test_a_bare_name_stands_for_its_section_in_python_too() -> None:
    config = Config(env="key_door", model="tiny", method="rloo")  # pyright: ignore[reportArgumentType]
    assert (config.env.name, config.model.name, config.method.name) == ("key_door", "tiny", "rloo")
    assert config == Config.model_validate({"env": "key_door", "model": {"name": "tiny"}, "method": {"name": "rloo"}})
    with pytest.raises(ConfigError, match="train='fast'"):
        Config(train="fast")  # pyright: ignore[reportArgumentType]
