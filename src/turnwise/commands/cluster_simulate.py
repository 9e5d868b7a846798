"""`turnwise cluster simulate`: steps/s, staleness and idle shares of a run on many devices, before they are rented."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.training.simulation import ClusterShape, MeasuredRates
    from turnwise.training.simulation_rates import MeasuredRun
    from turnwise.training.simulation_report import SimulationPlan

_EXAMPLES = """\
examples:
  turnwise cluster simulate --sampler-rate 1:60,16:800,128:3000 --trainer-rate 20000 --env-latency 2:30
  turnwise cluster simulate --from runs/NAME
  turnwise cluster simulate --from runs/NAME --devices 1,2,4 --placement separate --max-staleness 2 --json
"""
_DEVICES = "8,16,64,256,1024,4096"


def add_simulate_parser(actions: Any) -> None:
    """Add `simulate` to the actions of `turnwise cluster`."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "simulate",
        help="predict steps/s, staleness and idle shares for many devices",
        description="Simulate a run, event by event, from rates that were measured on one device or in a run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--from", dest="source", metavar="RUN", help="read rates, attempts and settings from this run")
    add("--devices", default=_DEVICES, help=f"numbers of devices, rising (default: {_DEVICES})")
    add("--placement", choices=("separate", "colocated"), help="samplers on devices of their own (default), or shared")
    add("--learner-share", type=float, default=0.25, help="share of the devices that learn, if separate (0.25)")
    add("--grow", action="store_true", help="the tasks of a step grow with the devices")
    add("--steps", type=int, default=20, help="steps to simulate for each number (20)")
    add("--seed", type=int, default=0, help="the same seed gives the same numbers (0)")
    add("--json", action="store_true", help="print JSON")
    _add_rates(parser.add_argument_group("rates, which replace those of the run"))
    _add_load(parser.add_argument_group("load, which replaces that of the run"))


def _add_rates(group: Any) -> None:
    add = group.add_argument
    add("--sampler-rate", metavar="N:TOKENS,...", help="tokens/s of a sampler device, by replies drawn at once")
    add("--trainer-rate", type=float, metavar="TOKENS", help="tokens/s of a learner device")
    add("--publish-s", type=float, metavar="S", help="seconds until one sampler has new weights (0)")
    add("--sync-s", type=float, metavar="S", help="seconds to sum the gradient over very many learners (0)")
    add("--attempt-failure", type=float, metavar="P", help="probability that a try of an attempt fails (0)")
    add("--device-failures-per-h", type=float, metavar="N", help="failures of one device in an hour (0)")
    add("--restart-s", type=float, metavar="S", help="seconds until a failed device works again (120)")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--env-latency", metavar="MEDIAN:P99", help="log-normal seconds of one call of the env (0:0)")
    add("--turns", type=int, help="turns of an attempt (4)")
    add("--tokens-per-turn", type=float, metavar="N", help="sampled tokens of a turn (256)")
    add("--context-tokens", type=float, metavar="N", help="tokens of an attempt that are trained on, not sampled (0)")
    add("--tasks-per-step", type=int, metavar="N", help="groups that a step learns from (64)")
    add("--group-size", type=int, metavar="N", help="attempts of a group (8)")
    add("--max-staleness", type=int, metavar="N", help="as train.max_staleness (0)")
    add("--concurrency", type=int, metavar="N", help="attempts at the same time for each sampler device (64)")
    add("--max-envs", type=int, metavar="N", help="most attempts at the same time in all; 0: no limit (0)")


def run_simulate(options: argparse.Namespace) -> int:
    """Simulate, and print a table or JSON."""
    from turnwise.training.simulation_rates import read_measured_run
    from turnwise.training.simulation_report import check_against, make_regimes, regime_lines

    run = None
    if options.source is not None:
        run = read_measured_run(options.source, publish_s=options.publish_s or 0.0)
    plan = _plan(options, run)
    check = None if run is None else check_against(run, seed=options.seed)
    regimes = make_regimes(plan)
    if options.json:
        print(json.dumps({"seed": options.seed, "run": check, "regimes": [one.to_json() for one in regimes]}, indent=1))
        return 0
    if check is not None:
        print(
            f"this run     {check['predicted_s']:.3g} s per step simulated, {check['measured_s']:.3g} s measured "
            f"({check['error']:+.0%})\n"
        )
    print("\n".join(regime_lines(regimes)))
    print("\nbound by     the part that makes steps fastest if it alone is twice as good, and by how much")
    print("if staler    the same for max_staleness + 1")
    return 0


def _plan(options: argparse.Namespace, run: MeasuredRun | None) -> SimulationPlan:
    from turnwise.training.simulation_report import SimulationPlan

    devices = _devices(options.devices)
    if not 0 < options.learner_share < 1:
        raise ConfigError(f"--learner-share must be between 0 and 1; got {options.learner_share}")
    return SimulationPlan(
        rates=_rates(options, run),
        shape=_shape(options, run),
        devices=devices,
        learner_share=options.learner_share,
        grows=options.grow,
        num_steps=options.steps,
        seed=options.seed,
    )


def _rates(options: argparse.Namespace, run: MeasuredRun | None) -> MeasuredRates:
    from turnwise.training.simulation import MeasuredRates
    from turnwise.training.simulation_attempts import lognormal_groups

    names = ("publish_s", "sync_s", "attempt_failure", "device_failures_per_h", "restart_s", "context_tokens")
    given = _given(options, names)
    if options.sampler_rate is not None:
        given["sampler"] = _pairs(options.sampler_rate, "--sampler-rate", "1:60,16:800")
    if options.trainer_rate is not None:
        given["trainer"] = options.trainer_rate
    if run is None or any(_given(options, ("env_latency", "turns", "tokens_per_turn"))):
        if run is not None and None in (options.env_latency, options.turns, options.tokens_per_turn):
            raise ConfigError("to replace the attempts of a run, give --env-latency, --turns and --tokens-per-turn")
        ((median_s, p99_s),) = _pairs(options.env_latency or "0:0", "--env-latency", "2:30")[:1]
        given["draw_groups"] = lognormal_groups(
            turns=4 if options.turns is None else options.turns,
            tokens_per_turn=256 if options.tokens_per_turn is None else options.tokens_per_turn,
            env_median_s=median_s,
            env_p99_s=p99_s,
        )
    if run is not None:
        return replace(run.rates, **given)
    if "sampler" not in given or "trainer" not in given:
        raise ConfigError("give --sampler-rate and --trainer-rate, or --from RUN to read them from a run")
    return MeasuredRates(**given)


def _shape(options: argparse.Namespace, run: MeasuredRun | None) -> ClusterShape:
    from turnwise.training.simulation import ClusterShape

    given = _given(options, ("tasks_per_step", "group_size", "max_staleness", "concurrency", "max_envs"))
    if options.placement is not None:
        given["is_colocated"] = options.placement == "colocated"
    start = ClusterShape(samplers=1, learners=1, tasks_per_step=64) if run is None else run.shape
    return replace(start, **given)


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """The options that were given, by name."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _devices(text: str) -> list[int]:
    try:
        devices = [int(number) for number in text.split(",")]
    except ValueError:
        devices = []
    if not devices or devices != sorted(set(devices)) or devices[0] < 1:
        raise ConfigError(f"--devices must be rising whole numbers such as 8,64,512; got {text!r}")
    return devices


def _pairs(text: str, option: str, example: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [tuple(float(number) for number in pair.split(":")) for pair in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{option} must look like {example}; got {text!r}")
    return tuple((pair[0], pair[1]) for pair in pairs)
