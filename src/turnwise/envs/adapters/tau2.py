"""tau2-bench's customer service as worlds: `turnwise train env=tau2:retail`.

    system     You are a clerk ... <policy> ... Tools: ...
    user       I want to know how many tshirt options are available in the online store right now. ...
    assistant  Is there anything else that I should know?
    user       I am Yusuf Rossi in zipcode 19122.
    assistant  <tool_call>{"name": "find_user_id_by_name_zip", "arguments": {...}}</tool_call>
    tool       yusuf_rossi_9620
    ...
    assistant  It is done: 10.
    user       ###STOP###

The data, tools, policies and rules of success are those that come with the package `inspect-evals`. A reply with calls
goes to the tools, any other reply to the customer, who is a script, a model or an address (docs/opponents.md). The
customer ends the conversation; then the database must be the one that the answer's calls make, and what had to be told
must have been told. For telecom, where the customer has a phone to work on, the package's assertions about phone and
account must hold.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from turnwise.envs.adapters.tau2_talk import (
    ASK_MORE,
    ENDS,
    OPENING,
    asked_call,
    brief_customer,
    expert_replies,
    is_told,
    next_words,
    pieces_of,
)
from turnwise.envs.adapters.tau2_tools import (
    DOMAINS,
    ServiceState,
    check_package,
    digest_of,
    gold_actions,
    gold_changes,
    is_read_only,
    is_same_call,
    read_cases,
    read_policy,
    read_splits,
    read_tools,
)
from turnwise.envs.base import Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.game import SeatOutcome
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.seats import SeatedEnv, scripted_env, with_script
from turnwise.envs.splits import draw, random_for
from turnwise.envs.tools import CALL_FORMAT, format_tool_call, read_calls
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message, ToolCall

CLERK, CUSTOMER = 0, 1
RULES = (
    "You are a clerk who helps customers by the policy below. In each reply you either write to the customer or make "
    "tool calls, not both."
)
_NOTHING = "Write a tool call, or words to the customer."
_GONE = "(The customer says nothing more.)"
_PHONE_CALLS = 8
"""What a customer can do on the phone before it has to say something."""


@dataclass(frozen=True, slots=True)
class Tau2World:
    """One domain of tau2-bench."""

    scripted_opponents: ClassVar[tuple[str, ...]] = ("script",)
    scripted_seats: ClassVar[tuple[int, ...]] = (CUSTOMER,)
    difficulties: ClassVar[Levels] = ({"max_calls": 4}, {"max_calls": 8}, {"max_calls": 1000})

    domain: str
    """`retail`, `airline` or `telecom`."""
    _: KW_ONLY
    pool: Literal["base", "full"] = "base"
    """Tasks to draw from: those of the benchmark, or for telecom all variants of them."""
    max_calls: int = 1000
    """Leaves out tasks whose answer has more calls than this."""
    idle_tasks: bool = False
    """Whether to keep the tasks that a clerk solves who does nothing."""
    opponent: str = "script"
    """Who plays the customer: the script, or a model (docs/opponents.md), which may err."""
    user_replies: int = 0
    """How often the customer speaks at most; 0: as often as the clerk. `opponent.max_tokens` bounds each reply."""
    user_words: int = 200
    """Most words of what the customer says; the rest is cut."""
    partial_credit: float = 0.0
    """Reward for the share of the answer's calls that were made, if the attempt fails."""
    max_turns: int = 40
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if self.domain not in DOMAINS:
            near = did_you_mean(self.domain, DOMAINS)
            raise ConfigError(f"tau2 has no domain {self.domain!r}{near}; expected {', '.join(DOMAINS)}")
        if self.pool not in ("base", "full") or (self.pool == "full" and self.domain != "telecom"):
            raise ConfigError(f"pool={self.pool} for {self.domain}; expected base, or for telecom full")
        if self.max_turns < 1 or self.user_replies < 0 or self.user_words < 1:
            raise ConfigError(
                f"max_turns={self.max_turns}, user_replies={self.user_replies}, user_words={self.user_words}; "
                "expected at least 1, 0 or more, and at least 1"
            )
        check_fractions(self, "partial_credit")
        check_package()

    @property
    def name(self) -> str:
        return f"tau2:{self.domain}"

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """The benchmark's own split. A variant of a held-out task of telecom, another persona, is held out too."""
        listed = read_splits(self.domain)
        held_out = {_without_persona(name) for name in listed["test"]}
        found = [
            Task(id=f"{self.domain}-{name}", data={"case": name})
            for name, case in read_cases(self.domain).items()
            if name in listed[self.pool]
            and (_without_persona(name) in held_out) == (split == "test")
            and len(gold_actions(case)) <= self.max_calls
            and (self.idle_tasks or not solves_itself(self.domain, name))
        ]
        if not found and count:
            raise ConfigError(f"{self.name} has no {split} task with at most {self.max_calls} calls; raise max_calls")
        return draw(found, count, random_for(self.name, self.pool, split, seed)) if count else []

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        return scripted_env(self, task, seed)

    def policy_seat(self, task: Task) -> int:  # noqa: ARG002 - the policy is the clerk
        return CLERK

    def make_game(self, task: Task, seed: int) -> ServiceGame:  # noqa: ARG002 - nothing is random
        return ServiceGame(self, self.case(task))

    def case(self, task: Task) -> Mapping[str, Any]:
        return read_cases(self.domain)[task.data["case"]]

    def scripted_reply(self, opponent: str, task: Task, game: ServiceGame, seed: int) -> str:  # noqa: ARG002 - there is one script
        return game.script()

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The answers' calls."""
        return play_demonstrations(with_script(self), self.expert, count, seed)

    def expert(self, task: Task) -> ScriptedPlayer:
        left = iter(expert_replies(self.case(task)))
        return lambda dialogue: next(left, "It is done.")  # noqa: ARG005 - the answer is known

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Calls any tool with values of the answer's calls, asks, or says that it is done."""
        rng = random_for("random", seed, task.id)
        values = [value for action in gold_actions(self.case(task)) for value in action["arguments"].values()]
        return lambda dialogue: self._any_reply(rng, values or ["x"])  # noqa: ARG005 - random play does not read

    def _any_reply(self, rng: random.Random, values: Sequence[Any]) -> str:
        if rng.random() < 0.3:
            return rng.choice((ASK_MORE, "It is done."))
        tool = rng.choice(list(read_tools(self.domain, "assistant").values()))
        return format_tool_call(tool.name, **{name: rng.choice(values) for name in tool.required})


def _without_persona(name: str) -> str:
    return name.partition("[PERSONA")[0]


@functools.lru_cache(maxsize=8192)
def solves_itself(domain: str, case_id: str) -> bool:
    """Whether a clerk who does nothing succeeds. Such a task tells nothing about a policy that learned nothing."""
    case = read_cases(domain)[case_id]
    return is_solved(domain, case, ServiceState.of(domain, case), [], [])


def is_solved(
    domain: str, case: Mapping[str, Any], state: ServiceState, said: Sequence[str], made: Sequence[tuple[str, ToolCall]]
) -> bool:
    """The package's rules of success.

    Args:
        said: What the clerk told the customer.
        made: The calls of both sides.
    """
    criteria = case["evaluation_criteria"]
    if domain != "telecom":
        facts: Sequence[str] = criteria.get("communicate_info") or ()
        return all(is_told(fact, said) for fact in facts) and state.changes() == gold_changes(domain, case["id"])
    needed = gold_actions(case) if "ACTION" in criteria.get("reward_basis", ()) else []
    if not all(_is_made(action, made) for action in needed):
        return False
    return all(state.holds(assertion) for assertion in criteria.get("env_assertions") or ())


def _is_made(action: Mapping[str, Any], made: Sequence[tuple[str, ToolCall]]) -> bool:
    who = action.get("requestor", "assistant")
    return any(caller == who and is_same_call(call, action) for caller, call in made)


class ServiceGame:
    """One conversation: seat 0 is the clerk, seat 1 the customer, who speaks first and ends it."""

    num_seats = 2

    def __init__(self, world: Tau2World, case: Mapping[str, Any]) -> None:
        self._world = world
        self._case = case
        self._pieces = pieces_of(case)
        self._num_told = 0
        self._due = next_words("", self._pieces, 0)
        """What the script says next, and how much it has told then."""
        self._state = ServiceState.of(world.domain, case)
        self._made: tuple[tuple[str, ToolCall], ...] = ()
        self._said: tuple[str, ...] = ()
        """What the clerk told the customer."""
        self._question = OPENING
        self._result: Message | None = None
        """What the customer's last call on the phone gave."""
        self._num_phone_calls = 0
        self._is_asked = True
        self._is_over = False
        self._num_user_replies = 0
        self._num_errors = 0
        self._heard: list[Message] = []
        self.turn = 0

    @property
    def to_move(self) -> int | None:
        if self._is_over:
            return None
        if self._is_asked:
            return CUSTOMER
        return None if self.turn >= self._world.max_turns else CLERK

    def rules(self, seat: int) -> list[Message]:
        domain = self._world.domain
        if seat == CUSTOMER:
            return [system(brief_customer(domain, self._case))]
        listed = "\n".join(tool.to_text() for tool in read_tools(domain, "assistant").values())
        return [system(f"{RULES}\n{read_policy(domain)}\nTools:\n{listed}\nCall a tool like this:\n{CALL_FORMAT}")]

    def view(self, seat: int) -> list[Message]:
        if seat == CUSTOMER:
            return [user(self._question) if self._result is None else self._result]
        return list(self._heard)

    def script(self) -> str:
        """What the scripted customer says or does next."""
        if self._result is not None:
            return f"It says: {self._result.content}"
        call = asked_call(self._question, read_tools(self._world.domain, "user"))
        if call is not None:
            return format_tool_call(call.name, **call.arguments)
        return self._due[0]

    def move(self, reply: Message) -> bool:
        said, calls, problem = read_calls(reply)
        if self._is_asked:
            return self._move_customer(said or reply.content, calls)
        self.turn += 1
        if problem or not (calls or said):
            self._heard = [user(problem or _NOTHING)]
            return False
        if calls:
            self._heard = [self._call(call, "assistant") for call in calls]
        elif self._num_user_replies >= (self._world.user_replies or self._world.max_turns):
            self._said += (said,)
            self._heard, self._is_over = [user(_GONE)], True
        else:
            self._said += (said,)
            self._question, self._result, self._is_asked, self._num_phone_calls = said, None, True, 0
            self._due = next_words(said, self._pieces, self._num_told)
        return True

    def outcome(self, seat: int) -> SeatOutcome:  # noqa: ARG002 - both want the same
        is_success = is_solved(self._world.domain, self._case, self._state, self._said, self._made)
        gold = gold_actions(self._case)
        share = sum(_is_made(action, self._made) for action in gold) / max(1, len(gold))
        return SeatOutcome(
            reward=1.0 if is_success else self._world.partial_credit * share,
            is_success=is_success,
            info={
                "gold_calls_share": share,
                "calls": float(sum(who == "assistant" for who, _ in self._made)),
                "call_errors": float(self._num_errors),
                "user_replies": float(self._num_user_replies),
            },
            messages=self._heard,
        )

    def key(self) -> str:
        """What was changed and told so far, and the number of turns. What was only looked up does not matter."""
        changes = [[who, call.name, call.arguments] for who, call in self._made if not is_read_only(call.name)]
        return f"turn {self.turn} told {self._num_told} {digest_of([changes, self._said, self._is_over])}"

    def copy(self) -> ServiceGame:
        twin = object.__new__(ServiceGame)
        twin.__dict__.update(self.__dict__)  # everything else is replaced, never changed
        twin._state = self._state.copy()
        return twin

    def _move_customer(self, said: str, calls: Sequence[ToolCall]) -> bool:
        has_phone = bool(read_tools(self._world.domain, "user"))
        if calls and has_phone and self._num_phone_calls < _PHONE_CALLS:
            self._num_phone_calls += 1
            self._result = self._call(calls[0], "user")
            return True
        words = said.split()[: self._world.user_words]
        self._num_told = self._due[1] if self._result is None else self._num_told
        self._num_user_replies += 1
        self._heard, self._is_asked, self._result = [user(" ".join(words) or "...")], False, None
        self._is_over = any(end in said for end in ENDS)
        return bool(words)

    def _call(self, call: ToolCall, who: Literal["assistant", "user"]) -> Message:
        answer = self._state.call(call, who)
        self._made += ((who, call),)
        self._num_errors += who == "assistant" and answer.startswith("Error")
        return Message(role="tool", name=call.name, content=answer)
