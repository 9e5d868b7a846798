"""The desk of a shop: hear what a customer wants, look it up, keep to the rules, and change the database.

    system     You are the clerk of a shop. Rules: ... Tools: ...
    user       I want my money back for the red lamp.
    assistant  What is the order?
    user       It is 412.
    assistant  <tool_call>{"name": "find_order", "arguments": {"order": 412}}</tool_call>
    tool       Ann: red lamp 45, blue cap 15; delivered on day 92; to 5 Oak Street
    assistant  What is your PIN?
    user       My PIN is 4417.
    assistant  <tool_call>{"name": "verify", "arguments": {"order": 412, "pin": 4417}}</tool_call>
    tool       Ann is verified
    assistant  <tool_call>{"name": "refund", "arguments": {"order": 412, "item": "red lamp"}}</tool_call>
    tool       45 paid back
    assistant  <tool_call>{"name": "close", "arguments": {}}</tool_call>      outcome 1

A reply with a call goes to the tools, any other reply to the customer. The customer is a script that tells one thing at
a time, or a model (`opponent`, docs/opponents.md); with `side=customer` the policy learns to be one. Success is a
matter of the database, not of words: every request is settled as the rules say, by the change or by a refusal with the
right reason; nothing else has changed; no call broke a rule on the way; the checks that the rules ask for were made;
and the desk was closed. `level` says how much can go wrong. One task in five is held out.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from turnwise.envs.base import Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.game import SeatOutcome
from turnwise.envs.library.customer_service_rules import (
    REASONS,
    ServiceDesk,
    ShopPolicy,
    decide,
    draw_policy,
)
from turnwise.envs.library.customer_service_shop import REQUEST_KINDS, Request, ShopData, ShopSize, draw_shop
from turnwise.envs.library.customer_service_talk import (
    ASK_ADDRESS,
    ASK_MORE,
    ASK_ORDER,
    ASK_PIN,
    ASK_RECEIPT,
    NOTHING_LEFT,
    asked_for,
    brief_customer,
    expert_replies,
    is_told,
    pieces_of,
    say_pieces,
    told_unasked,
)
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.seats import SeatedEnv, scripted_env, with_script
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.envs.tools import ParsedReply, Toolbox, format_tool_call
from turnwise.errors import ConfigError
from turnwise.trajectory import Message, ToolCall

DeskProtocol = Literal["tool_call", "line"]
CLERK, CUSTOMER = 0, 1
_GONE = "(The customer says nothing more.)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskLevel:
    """One level of the dial."""

    size: ShopSize
    policy: ShopPolicy
    is_terse: bool
    """The customer tells one thing at a time."""
    wrong_pins: float
    """How many callers are not who they say they are."""
    draws_policy: bool
    """The numbers in the rules differ from task to task."""
    turns: int
    """The turns of an attempt, about half as many again as the expert needs."""

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that this level needs."""
        names = ["find_order"]
        names += ["cancel"] if "cancel" in self.size.kinds else []
        names += ["change_address"] if "address" in self.size.kinds else []
        names += ["check_stock", "refund", "exchange"] if self.has_returns else []
        names += ["refuse"] if self.size.refused_share else []
        names += ["verify"] if self.policy.verifies else []
        names += ["check_receipt"] if self.policy.asks_receipts else []
        names += ["find_customer"] if self.size.hides_order else []
        return (*names, "close")

    @property
    def has_returns(self) -> bool:
        return bool({"refund", "exchange"} & set(self.size.kinds))


def _level(step: int) -> DeskLevel:
    return DeskLevel(
        size=ShopSize(
            num_customers=(1, 2, 2, 3, 3, 4)[step],
            num_requests=(1, 1, 1, 1, 2, 3)[step],
            kinds=REQUEST_KINDS if step else ("cancel", "address"),
            refused_share=(0.0, 0.3, 0.3, 0.4, 0.4, 0.4)[step],
            first_order=100 if step else 1,
            hides_order=step >= 3,
        ),
        policy=ShopPolicy(verifies=step >= 2, asks_receipts=step >= 3),
        is_terse=step >= 2,
        wrong_pins=0.1 if step >= 3 else 0.0,
        draws_policy=step == 5,
        turns=(5, 6, 11, 15, 26, 36)[step],
    )


LEVELS = tuple(_level(step) for step in range(6))


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerService:
    """The world `customer_service`."""

    name: ClassVar[str] = "customer_service"
    scripted_opponents: ClassVar[tuple[str, ...]] = ("script",)
    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(len(LEVELS)))

    level: int = 1
    """How much can go wrong, 0 to 5 (docs/worlds/customer_service.md)."""
    kinds: list[str] = field(default_factory=list[str])
    """Kinds of requests to draw from: cancel, address, refund, exchange; empty: as the level says."""
    side: Literal["clerk", "customer"] = "clerk"
    """Whom the policy plays. A customer is trained to play the other side of another run."""
    opponent: str = "script"
    """Who plays the other side, usually the customer: the script, or a model (docs/opponents.md), which may err."""
    protocol: DeskProtocol = "tool_call"
    """How tools are called: as tool calls in JSON, or as a line such as `refund 412, red mug`."""
    max_turns: int = 0
    """Replies of the clerk; 0: as the level says."""
    user_replies: int = 0
    """How often the customer speaks at most; 0: as often as the clerk. `opponent.max_tokens` bounds each reply."""
    user_words: int = 40
    """Most words of what the customer says; the rest is cut."""
    partial_credit: float = 0.3
    """Reward for the share of requests that are settled, if some are not and nothing was done against the rules."""
    demonstration_skill: float = 1.0
    """How often a demonstration does the right thing instead of anything."""

    def __post_init__(self) -> None:
        if not 0 <= self.level < len(LEVELS):
            raise ConfigError(f"level={self.level}; expected 0 to {len(LEVELS) - 1}")
        if unknown := [kind for kind in self.kinds if kind not in REQUEST_KINDS]:
            raise ConfigError(f"kinds has {unknown[0]!r}; expected some of {', '.join(REQUEST_KINDS)}")
        if self.side not in ("clerk", "customer"):
            raise ConfigError(f"side={self.side!r}; expected clerk or customer")
        if self.side == "customer" and self.demonstration_skill < 1:
            raise ConfigError(
                f"demonstration_skill={self.demonstration_skill} is not read with side=customer, which makes no slips; "
                "set demonstration_skill=1"
            )
        if self.protocol not in ("tool_call", "line"):
            raise ConfigError(f"protocol={self.protocol!r}; expected tool_call or line")
        if self.max_turns < 0 or self.user_replies < 0 or self.user_words < 1:
            raise ConfigError(
                f"max_turns={self.max_turns}, user_replies={self.user_replies}, user_words={self.user_words}; "
                "expected 0 or more, 0 or more, and at least 1"
            )
        if not self.max_turns:
            object.__setattr__(self, "max_turns", LEVELS[self.level].turns)
        check_fractions(self, "partial_credit", "demonstration_skill")

    @property
    def max_tokens(self) -> int:
        return 40 if self.protocol == "line" else 96

    @property
    def dial(self) -> DeskLevel:
        """The level, with the kinds of requests that the options ask for."""
        dial = LEVELS[self.level]
        if not self.kinds:
            return dial
        kinds = tuple(kind for kind in REQUEST_KINDS if kind in self.kinds)
        return replace(dial, size=replace(dial.size, kinds=kinds))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, self.level, self.kinds, split, seed))

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        return scripted_env(self, task, seed)

    def policy_seat(self, task: Task) -> int:  # noqa: ARG002 - the same in every task
        return CLERK if self.side == "clerk" else CUSTOMER

    def make_game(self, task: Task, seed: int) -> DeskGame:  # noqa: ARG002 - the seed reaches the customer's words
        return DeskGame(self, DeskCase(task.data))

    def scripted_reply(self, opponent: str, task: Task, game: DeskGame, seed: int) -> str:  # noqa: ARG002 - one script
        if game.to_move == CLERK:
            replies = self._expert_replies(task)
            return replies[min(game.turn, len(replies) - 1)]
        return say_pieces([game.pieces[index] for index in game.due], seed)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(with_script(self), lambda task: self.expert(task, seed), count, seed)

    def expert(self, task: Task, seed: int) -> ScriptedPlayer:
        """A clerk who does everything right, with the slips that `demonstration_skill` asks for; or a customer."""
        if self.side == "customer":
            return self._customer(task)
        rng, replies = random_for("demo", seed, task.id), iter(self._expert_replies(task))

        def reply(dialogue: Sequence[Message]) -> str:  # noqa: ARG001 - the customer's script answers as is expected
            is_skilled = rng.random() < self.demonstration_skill
            return next(replies, self._write("close")) if is_skilled else self._anything(task, rng)

        return reply

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Asks anything, and makes any call with arguments that fit. A customer says anything that it knows."""
        rng = random_for("random", seed, task.id)
        if self.side == "customer":
            pieces = self.make_game(task, seed).pieces
            return lambda _: rng.choice(rng.choice(pieces).wordings)
        return lambda _: self._anything(task, rng)

    def _customer(self, task: Task) -> ScriptedPlayer:
        """A customer who tells what it is asked for, in the words of its brief."""
        pieces, told = self.make_game(task, 0).pieces, set[int]()

        def reply(dialogue: Sequence[Message]) -> str:
            due = asked_for(dialogue[-1].content, pieces, sorted(told)) if told else [0]
            told.update(due)
            return " ".join(pieces[index].wordings[0] for index in due) or NOTHING_LEFT

        return reply

    def _anything(self, task: Task, rng: random.Random) -> str:
        case = DeskCase(task.data)
        order = rng.choice(list(case.before.orders))
        items = case.before.orders[order].items
        item, street = rng.choice(items), rng.choice([row.address for row in case.before.orders.values()])
        values: dict[str, Any] = {
            "order": order,
            "item": item,
            "new_item": rng.choice([name for name in case.before.stock if name.split()[1] == item.split()[1]]),
            "address": rng.choice([street, *(request.wanted for request in case.requests if request.wanted)]),
            "reason": rng.choice(REASONS),
            "pin": case.pin,
            "receipt": rng.choice([request.receipt for request in case.requests]),
            "name": case.caller,
        }
        toolbox = ServiceDesk(case.before, case.policy).toolbox(self.dial.tools)
        spec = rng.choice((None, *toolbox.specs))
        if spec is None:
            return rng.choice((ASK_ORDER, ASK_ADDRESS, ASK_PIN, ASK_RECEIPT, ASK_MORE))
        return self._write(spec.name, **{option.name: values[option.name] for option in spec.signature.parameters})

    def _write(self, name: str, /, **arguments: Any) -> str:
        if self.protocol == "tool_call":
            return format_tool_call(name, **arguments)
        return f"{name} {', '.join(str(value) for value in arguments.values())}".strip()

    def _expert_replies(self, task: Task) -> list[str]:
        case, dial = DeskCase(task.data), self.dial
        caller = {
            "name": case.caller,
            "pin": case.pin,
            "is_terse": dial.is_terse,
            "may_go_on": dial.size.num_requests > 1,
        }
        return expert_replies(case.before, case.policy, caller, case.requests, self._write)

    def _draw_task(self, rng: random.Random) -> Task:
        dial = self.dial
        most = dial.size.num_requests
        drawn = rng.choice((most - 1, most)) if most > 1 else most
        data, caller, requests = draw_shop(rng, dial.size, drawn)
        pin = data.customers[caller].pin
        if rng.random() < dial.wrong_pins:
            pin = 1000 + (pin + rng.randrange(1, 8999) - 1000) % 9000
        policy = draw_policy(rng, dial.policy) if dial.draws_policy else dial.policy
        values = {
            "shop": data.to_json(),
            "caller": caller,
            "pin": pin,
            "policy": policy.to_json(),
            "requests": [request.to_json() for request in requests],
        }
        name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        return Task(id=f"desk-{self.level}-{name}", data=values)


class DeskCase:
    """What a task says, read from its data."""

    def __init__(self, data: Any) -> None:
        self.before = ShopData.from_json(data["shop"])
        self.caller: str = data["caller"]
        self.pin: int = data["pin"]
        self.policy = ShopPolicy(**data["policy"])
        self.requests = tuple(Request(**request) for request in data["requests"])

    def wanted(self) -> tuple[ShopData, set[str]]:
        """The database as it must be at the end, and the checks that must have been made."""
        desk, checks = ServiceDesk(self.before.copy(), self.policy), set[str]()
        for request in self.requests:
            decision = decide(self.policy, desk.data, request, self.pin)
            getattr(desk, decision.tool)(**decision.arguments)
            checks |= decision.checks(self.policy)
        return desk.data, checks


class DeskGame:
    """One conversation: seat 0 is the clerk, seat 1 the customer, who speaks first."""

    num_seats = 2

    def __init__(self, world: CustomerService, case: DeskCase) -> None:
        self._world = world
        self._case = case
        self._wanted, self._checks = case.wanted()
        self.pieces = pieces_of(case.requests, case.caller, case.pin, case.policy, is_terse=world.dial.is_terse)
        self._told: tuple[int, ...] = ()
        self.due: tuple[int, ...] = (0,)
        """The pieces that the customer tells next, if it is the script."""
        self._is_asked = True
        """The customer has to say something."""
        self._num_said = 0
        self._num_wrong = 0
        """Replies of the customer that do not hold what it was asked for."""
        self._num_unasked = 0
        """Pieces that the customer told before it was asked for them."""
        self.turn = 0
        self.was_action = False
        self._heard: list[Message] = []
        """What the clerk sees next."""
        self._question = "How can I help you?"
        self.desk = ServiceDesk(case.before.copy(), case.policy)
        self._toolbox = self.desk.toolbox(world.dial.tools)

    @property
    def to_move(self) -> int | None:
        if self.desk.is_closed or self.turn >= self._world.max_turns:
            return None
        return CUSTOMER if self._is_asked else CLERK

    def rules(self, seat: int) -> list[Message]:
        if seat == CUSTOMER:
            return [system(brief_customer(self.pieces))]
        dial = self._world.dial
        more = (
            "Ask for more requests before you close." if dial.size.num_requests > 1 else "A customer has one request."
        )
        policy = self._case.policy.to_text(has_returns=dial.has_returns)
        return [system(f"You are the clerk of a shop. {policy} {more}\n{self._describe_tools()}")]

    def view(self, seat: int) -> list[Message]:
        return [user(self._question)] if seat == CUSTOMER else list(self._heard)

    def move(self, reply: Message) -> bool:
        self.was_action = False
        if self._is_asked:
            words = reply.content.split()[: self._world.user_words]
            heard = " ".join(words)
            self._num_wrong += not all(is_told(heard, self.pieces[index]) for index in self.due)
            self._num_unasked += len(told_unasked(heard, self.pieces, {*self.due, *self._told}))
            self._hear(heard or "...")
            self._told = tuple(sorted({*self._told, *self.due}))
            return bool(words)
        self.turn += 1
        said, calls, problem = self._read(reply)
        if problem:
            self._heard = [user(problem)]
        elif calls:
            self.was_action = True
            self._heard = []
            for call in calls:
                if not self.desk.is_closed:
                    self._heard.append(self._toolbox.call_now(call))
        else:
            self._ask(said)
        return not problem and bool(calls or said)

    def outcome(self, seat: int) -> SeatOutcome:
        """Both want the requests to be settled; a customer must have told what it was asked for, and nothing else."""
        data, wanted = self.desk.data, self._wanted
        own = {request.order for request in self._case.requests}
        rights = [_footprint(data, number) == _footprint(wanted, number) for number in own]
        damaged = [n for n in data.orders if n not in own and _footprint(data, n) != _footprint(wanted, n)]
        missed = self._checks - set(self.desk.checked)
        is_clean = self.desk.is_closed and not self.desk.violations and not damaged and not missed
        is_success = is_clean and data == wanted and (seat == CLERK or not self._num_wrong + self._num_unasked)
        share = sum(rights) / len(rights)
        return SeatOutcome(
            reward=1.0 if is_success else self._world.partial_credit * share * (is_clean and seat == CLERK),
            is_success=is_success,
            info={
                "settled_share": share,
                "violations": float(len(self.desk.violations)),
                "damaged_orders": float(len(damaged)),
                "missed_checks": float(len(missed)),
                "user_replies": float(self._num_said),
                "user_errors": float(self._num_wrong),
                "user_unasked": float(self._num_unasked),
            },
            messages=() if self.desk.is_closed else [user("The customer hangs up.")],
        )

    def key(self) -> str:
        """The database, what was checked and told, and the number of turns. The words do not matter."""
        desk = self.desk
        state = [asdict(desk.data), desk.violations, desk.verified, desk.receipts, desk.checked, self._told]
        digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
        return f"turn {self.turn} said {self._num_said} wrong {self._num_wrong} {self._num_unasked} {digest}"

    def copy(self) -> DeskGame:
        twin = object.__new__(DeskGame)
        twin.__dict__.update(self.__dict__)  # what was drawn never changes
        twin.desk = self.desk.copy()
        twin._toolbox = twin.desk.toolbox(self._world.dial.tools)
        return twin

    def _ask(self, said: str) -> None:
        """The clerk speaks to the customer, who answers as long as its budget lasts."""
        if self._num_said >= (self._world.user_replies or self._world.max_turns):
            self._heard = [user(_GONE)]
            return
        self._question = said or "..."
        self.due = tuple(asked_for(said, self.pieces, self._told))
        self._is_asked = True

    def _hear(self, words: str) -> None:
        self._heard, self._is_asked = [user(words)], False
        self._num_said += 1

    def _read(self, reply: Message) -> ParsedReply:
        if self._world.protocol == "tool_call":
            return self._toolbox.read(reply)
        return read_line(reply.content, self._toolbox)

    def _describe_tools(self) -> str:
        if self._world.protocol == "tool_call":
            return self._toolbox.describe()
        calls = [
            f"{spec.name} {', '.join(option.name.upper() for option in spec.signature.parameters)}".strip()
            for spec in self._toolbox.specs
        ]
        return "\n".join(["One call in a reply, or words to the customer. Calls:", *calls])


def _footprint(data: ShopData, number: int) -> tuple[Any, ...]:
    """All that the database has about an order."""
    paid, refused = ([row for row in rows if row[0] == number] for rows in (data.refunds, data.refusals))
    return asdict(data.orders[number]), paid, refused


def read_line(text: str, toolbox: Toolbox) -> ParsedReply:
    """Read `NAME ARGUMENT, ARGUMENT`. Anything that does not begin with the name of a tool is speech."""
    name, _, rest = text.strip().partition(" ")
    spec = next((spec for spec in toolbox.specs if spec.name == name), None)
    if spec is None:
        return ParsedReply(text.strip(), (), None)
    options = spec.signature.parameters
    values = [value.strip() for value in rest.split(",")] if rest.strip() else []
    if len(values) != len(options):
        expected = ", ".join(option.name.upper() for option in options)
        return ParsedReply(
            text.strip(), (), f"{name} takes {len(options)} arguments; expected {name} {expected}".strip()
        )
    arguments = {
        option.name: int(value) if option.annotation is int and value.isdecimal() and len(value) < 10 else value
        for option, value in zip(options, values, strict=True)
    }
    return ParsedReply("", (ToolCall(name=name, arguments=arguments),), None)
