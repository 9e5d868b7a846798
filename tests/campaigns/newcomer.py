"""The path of somebody who is new to turnwise, timed: a fresh clone, a first curve, an own world, a shipped model.

    make campaign NAME=newcomer                              in a fresh environment; its installation is timed apart
    make campaign NAME=newcomer ARGS="--environment .venv"   in one that is there

The programs are those of the pages: the first Python block of README.md, the env and the commands of
docs/tutorials/demonstrations.md, and what docs/export.md says about transformers. The campaign fails if a time
is over its limit, if the curve does not rise, or if the exported model does not answer as it was taught.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environments import ROOT
from turnwise.runlog.reader import RunReader

LIMITS_S = {"first curve": 180.0, "own world trained": 900.0, "exported model answers": 1200.0}
"""Since the package was installed."""
OWN_WORLD = "hidden_sum.py:HiddenSum"
ASK = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
asked = [{"role": "user", "content": "Say next to see a number."}]
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
reply = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1]:]
print(tokenizer.decode(reply, skip_special_tokens=True))
"""


def python_blocks(page: Path) -> list[str]:
    """The Python blocks of a page, as they are printed."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@dataclass
class Newcomer:
    """A clone, an environment for it, and what was done when."""

    clone: Path
    binaries: Path
    home: Path
    started_s: float = field(default_factory=time.monotonic)
    problems: list[str] = field(default_factory=list)

    def do(self, *command: str) -> str:
        """Run a command in the clone, and print what it prints; returns its standard output."""
        print(f"$ {' '.join(command) if len(command[-1]) < 200 else command[0]}", flush=True)
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        variables |= {"TURNWISE_HOME": str(self.home), "PATH": f"{self.binaries}:{os.environ['PATH']}"}
        variables |= {"PYTHONPATH": str(self.clone / "src")}
        done = subprocess.run(command, cwd=self.clone, env=variables, text=True, stdout=subprocess.PIPE, check=False)
        print(done.stdout[-3000:], flush=True)
        if done.returncode:
            raise SystemExit(f"{command[0]} ended with {done.returncode}")
        return done.stdout

    def reached(self, name: str) -> None:
        took_s = time.monotonic() - self.started_s
        print(f"--- {name}: {took_s:.0f} s (limit {LIMITS_S[name]:.0f} s)", flush=True)
        if took_s > LIMITS_S[name]:
            self.problems.append(f"{name} after {took_s:.0f} s")

    def check_rise(self, what: str, successes: Sequence[float]) -> None:
        print(f"--- {what}: held-out success {' '.join(f'{one:.0%}' for one in successes)}", flush=True)
        if not successes or successes[-1] <= successes[0]:
            self.problems.append(f"{what} did not learn: {successes}")


def first_curve(person: Newcomer) -> None:
    """The first block of the README."""
    block, *_ = python_blocks(person.clone / "README.md")
    said = person.do("python", "-c", block)
    person.reached("first curve")
    person.check_rise("first curve", [int(share) / 100 for share in re.findall(r"(\d+)% of held-out", said)])


def own_world(person: Newcomer) -> None:
    """The env of the tutorial, checked, planned and trained with the tutorial's command."""
    page = person.clone / "docs" / "tutorials" / "demonstrations.md"
    person.do("python", "-c", python_blocks(page)[0])
    person.do("turnwise", "check-env", OWN_WORLD)
    lines = page.read_text(encoding="utf-8").splitlines()
    train = next(line.split() for line in lines if line.startswith(f"turnwise train {OWN_WORLD}"))
    person.do(*train, "--plan")
    person.do(*train, "run.dir=runs/own")
    person.reached("own world trained")
    with RunReader(person.clone / "runs" / "own") as run:
        person.check_rise("own world", [row.success for row in run.evaluations()])


def shipped_model(person: Newcomer) -> None:
    """Export the best checkpoint, and ask it with transformers alone."""
    person.do("turnwise", "export", "runs/own", "--merged", "out/model")
    answer = person.do("python", "-c", ASK, "out/model").strip()
    person.reached("exported model answers")
    if answer != "next":
        person.problems.append(f"the exported model says {answer!r}; it was taught to say 'next'")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make campaign NAME=newcomer", description=__doc__)
    parser.add_argument("--environment", metavar="DIR", help="a virtual environment that has turnwise's packages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "turnwise"
        began_s = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = Path(options.environment).absolute() if options.environment else clone / ".venv"
        person = Newcomer(clone=clone, binaries=environment / "bin", home=Path(folder) / "home")
        if options.environment is None:
            person.do("make", "setup")
            print(f"--- clone and installation: {time.monotonic() - began_s:.0f} s", flush=True)
        person.started_s = time.monotonic()
        for step in (first_curve, own_world, shipped_model):
            step(person)
        print(f"--- in all, with the installation: {time.monotonic() - began_s:.0f} s", flush=True)
    print("\n".join(person.problems) or "nothing wrong", flush=True)
    return int(bool(person.problems))


if __name__ == "__main__":
    sys.exit(main())
