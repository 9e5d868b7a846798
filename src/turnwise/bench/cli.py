"""`turnwise bench NAME`: sample, tenants, train, tree, branch, both, step, agreement, rollout, sandbox, async ..."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from turnwise.bench import (
    agreement,
    async_train,
    both,
    branch,
    busy,
    env_workers,
    families,
    learners,
    report,
    rollout,
    sample,
    sandbox,
    service,
    simulation,
    speculation,
    step,
    tenants,
    train,
    tree,
    worlds,
)

BENCHES = {
    "sample": sample,
    "speculation": speculation,
    "tenants": tenants,
    "train": train,
    "tree": tree,
    "branch": branch,
    "both": both,
    "step": step,
    "agreement": agreement,
    "rollout": rollout,
    "sandbox": sandbox,
    "service": service,
    "async": async_train,
    "busy": busy,
    "learners": learners,
    "env-workers": env_workers,
    "simulation": simulation,
    "families": families,
    "worlds": worlds,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of every benchmark."""
    parser = argparse.ArgumentParser(
        prog="turnwise bench", description="Measure speed on this machine, and compare it with another library."
    )
    benches = parser.add_subparsers(dest="bench", required=True)
    for name, module in BENCHES.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        bench = benches.add_parser(name, help=summary, description=summary)
        report.add_common_options(bench)
        module.add_options(bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    module = BENCHES[args.bench]
    show = getattr(module, "show", report.show)  # one that measures many things has a table of its own
    show(module.run(args), as_json=args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
