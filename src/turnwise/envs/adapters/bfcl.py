"""Multi-turn tasks of the Berkeley Function-Calling Leaderboard as worlds: `turnwise train env=bfcl:multi_turn_base`.

    system     Tools: ...
    user       Move 'final_report.pdf' within document directory to 'temp' directory in document. ...
    assistant  <tool_call>{"name": "cd", "arguments": {"folder": "document"}}</tool_call>
    tool       {"current_working_directory": "document"}
    assistant  ...
    assistant  It is moved.
    user       Perform a detailed search using grep to identify sections in the file ...

The user follows the package's script. A reply with calls goes to the tools; any other reply ends the user's request,
and the next one follows. After each request the benchmark's own checks are made: the state is the one that the answer's
calls make, and the results of these calls are among the results that the policy got. The first request that fails ends
the attempt.

The package evaluates calls with Python's `eval`, on objects that all attempts of a model share. Here every attempt has
objects of its own, and a call is a name and JSON arguments; no text of the policy is evaluated.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.envs.adapters.bfcl_tools import PACKAGE, StatefulTools, ToolDoc, read_gold_call
from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.base import Env, EnvStep, Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.envs.sync import as_env
from turnwise.envs.tools import CALL_FORMAT, format_tool_call, read_calls
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message, ToolCall

CATEGORIES = ("multi_turn_base", "multi_turn_miss_param", "multi_turn_miss_func", "multi_turn_long_context")
RULES = (
    "You do what the user asks by calling tools. When a request is done, or cannot be done with what you know and "
    "have, tell the user so in words, without a call."
)
NEW_TOOLS = "There are more tools now. Please do what I asked for."
DONE = "Done."
_NOTHING = "Write a tool call, or words to the user."


class BfclWorld:
    """One category of multi-turn tasks."""

    difficulties: ClassVar[Levels] = ({"max_calls": 3}, {"max_calls": 6}, {"max_calls": 1000})

    def __init__(
        self,
        category: str,
        *,
        max_calls: int = 1000,
        partial_credit: float = 0.0,
        max_turns: int = 40,
        max_tokens: int = 192,
    ) -> None:
        """
        Args:
            max_calls: Leave out tasks whose answer has more calls.
            partial_credit: Reward for the share of requests that were done before one failed.
        """
        if category not in CATEGORIES:
            near = did_you_mean(category, CATEGORIES)
            raise ConfigError(f"bfcl has no category {category!r}{near}; expected {', '.join(CATEGORIES)}")
        if not 0 <= partial_credit <= 1 or max_turns < 1:
            raise ConfigError(
                f"partial_credit={partial_credit}, max_turns={max_turns}; expected 0 to 1, and at least 1"
            )
        import_peer(PACKAGE, extra="bfcl", then="pip install --no-deps bfcl-eval")
        self.name = f"bfcl:{category}"
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.partial_credit = partial_credit
        self._entries = {
            name: entry
            for name, entry in read_entries(category).items()
            if entry["num_calls"] <= max_calls and is_solvable(entry)
        }

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Tasks with the same number are variants of one scene in all categories, so they share a split."""
        found = [
            Task(id=name, data={"entry": name})
            for name in self._entries
            if split_of(f"bfcl-{name.rpartition('_')[2]}") == split
        ]
        if not found and count:
            raise ConfigError(f"{self.name} has no {split} task with so few calls; raise max_calls")
        return draw(found, count, random_for(self.name, split, seed)) if count else []

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - nothing is random
        return as_env(BfclEnv(self, self.entry(task)))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The calls of the package's answers."""
        return play_demonstrations(self, self.expert, count, seed)

    def entry(self, task: Task) -> Mapping[str, Any]:
        return read_entries(self.name.removeprefix("bfcl:"))[task.data["entry"]]

    def expert(self, task: Task) -> ScriptedPlayer:
        replies = [
            reply
            for calls in gold_calls(self.entry(task))
            for reply in [*(format_tool_call(call.name, **call.arguments) for call in calls), DONE]
        ]
        left = iter(replies)
        return lambda dialogue: next(left, DONE)  # noqa: ARG005 - the answer is known

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Calls any tool with arguments of the answer's calls or none, or says that it is done."""
        rng = random_for("random", seed, task.id)
        entry = self.entry(task)
        docs = list(StatefulTools(entry).docs.values())
        values = [value for calls in gold_calls(entry) for call in calls for value in call.arguments.values()]
        return lambda dialogue: _any_reply(rng, docs, values or [0])  # noqa: ARG005 - random play does not read


def _any_reply(rng: random.Random, docs: Sequence[ToolDoc], values: Sequence[Any]) -> str:
    if rng.random() < 0.3:
        return DONE
    doc = rng.choice(docs)
    return format_tool_call(doc.name, **{name: rng.choice(values) for name in doc.required})


@functools.cache
def read_entries(category: str) -> Mapping[str, Mapping[str, Any]]:
    """The tasks of a category by name, each with its answer (`ground_truth`) and the number of its calls."""
    folder = importlib.resources.files(PACKAGE) / "data"
    (file,) = (found.name for found in folder.iterdir() if found.name.endswith(f"_{category}.json"))
    answers = {row["id"]: row["ground_truth"] for row in _read_lines(folder / "possible_answer" / file)}
    return {
        row["id"]: {**row, "ground_truth": answers[row["id"]], "num_calls": sum(map(len, answers[row["id"]]))}
        for row in _read_lines(folder / file)
    }


def _read_lines(file: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def gold_calls(entry: Mapping[str, Any]) -> list[list[ToolCall]]:
    """The answer's calls, request by request."""
    docs = StatefulTools(entry).docs
    return [[read_gold_call(text, docs) for text in texts] for texts in entry["ground_truth"]]


def hidden_tools(entry: Mapping[str, Any], request: int) -> set[str]:
    """The tools that are not shown at a request: some come later, and some never."""
    later: Mapping[str, Sequence[str]] = entry.get("missed_function", {})
    hidden = {name for start, names in later.items() if int(start) > request for name in names}
    return hidden | set(entry.get("excluded_function", ()))


def is_solvable(entry: Mapping[str, Any]) -> bool:
    """Whether the answer calls only what is shown. One task of the package does not."""
    return not any(
        call.name in hidden_tools(entry, request) for request, calls in enumerate(gold_calls(entry)) for call in calls
    )


class BfclEnv:
    """One attempt. Its methods are plain functions; `as_env` runs them."""

    def __init__(self, world: BfclWorld, entry: Mapping[str, Any]) -> None:
        self._world = world
        self._entry = entry
        self._gold = gold_calls(entry)
        self._tools = StatefulTools(entry)
        self._answer = StatefulTools(entry)
        self._request = 0
        self._turn = 0
        self._results: list[str] = []
        """The results of all calls of the policy."""
        self._num_calls = 0
        """Calls since the last request."""

    def start(self) -> list[Message]:
        listed = "\n".join(self._tools.docs[name].to_text() for name in self._shown())
        rules = f"{RULES}\nTools:\n{listed}\nCall a tool like this:\n{CALL_FORMAT}"
        return [system(rules), user(self._ask())]

    def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        said, calls, problem = read_calls(reply)
        if problem or (not calls and not said):
            return self._go_on([user(problem or _NOTHING)], is_unparsable=True)
        if calls:
            return self._go_on([self._call(call) for call in calls])
        if not self._is_request_done():
            return self._end(is_success=False)
        self._request += 1
        if self._request >= len(self._gold):
            return self._end(is_success=True)
        self._num_calls = 0
        return self._go_on([user(self._ask())])

    def close(self) -> None:
        pass

    def state_key(self) -> str:
        return self._tools.key([self._request, self._turn, self._num_calls, *self._results])

    def fork(self) -> BfclEnv:
        twin = BfclEnv(self._world, self._entry)
        twin._tools, twin._answer = self._tools.copy(), self._answer.copy()
        twin._request, twin._turn, twin._num_calls = self._request, self._turn, self._num_calls
        twin._results = list(self._results)
        return twin

    def _call(self, call: ToolCall) -> Message:
        self._num_calls += 1
        self._results.append(self._tools.call(call, self._shown()))
        return Message(role="tool", name=call.name, content=self._results[-1])

    def _shown(self) -> list[str]:
        hidden = hidden_tools(self._entry, self._request)
        return [name for name in self._tools.docs if name not in hidden]

    def _ask(self) -> str:
        said = self._entry["question"][self._request]
        if said:
            return str(said[0]["content"])
        new = self._entry["missed_function"][str(self._request)]
        return "\n".join([NEW_TOOLS, *(self._tools.docs[name].to_text() for name in new)])

    def _is_request_done(self) -> bool:
        """The benchmark's checks after a request."""
        gold = self._gold[self._request]
        results = [self._answer.call(call, list(self._answer.docs)) for call in gold]
        if not gold:
            return True  # it cannot be done yet; the state is compared after the next one
        if not self._num_calls:
            return False
        checker = importlib.import_module(f"{PACKAGE}.eval_checker.multi_turn_eval.multi_turn_checker")
        is_state_right = checker.state_checker(self._tools.objects, self._answer.objects)["valid"]
        return bool(is_state_right and checker.response_checker(self._results, results, self._request)["valid"])

    def _go_on(self, messages: Sequence[Message], *, is_unparsable: bool = False) -> EnvStep:
        is_cut = self._turn >= self._world.max_turns
        return EnvStep(
            messages=messages,
            reward=self._credit() if is_cut else 0.0,
            truncated=is_cut,
            is_success=False if is_cut else None,
            is_unparsable=is_unparsable,
            info=self._numbers(),
        )

    def _end(self, *, is_success: bool) -> EnvStep:
        reward = 1.0 if is_success else self._credit()
        return EnvStep(reward=reward, terminated=True, is_success=is_success, info=self._numbers())

    def _credit(self) -> float:
        """What the requests so far are worth if the last one is never done."""
        return self._world.partial_credit * self._request / len(self._gold)

    def _numbers(self) -> dict[str, float]:
        errors = sum(result.startswith("Error") for result in self._results)
        return {
            "requests_done": self._request / len(self._gold),
            "calls": float(len(self._results)),
            "call_errors": float(errors),
        }
