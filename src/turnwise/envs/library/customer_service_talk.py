"""What is said in `customer_service`: by the customer, who tells one thing at a time, and by the scripted clerk."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.envs.library.customer_service_rules import ShopPolicy, decide
from turnwise.envs.library.customer_service_shop import Request, ShopData

PieceKind = Literal["request", "order", "address", "pin", "receipt"]
_ASKED: dict[PieceKind, str] = {
    "order": r"\border\b|\bnumber of|\bname\b",
    "address": r"\baddress\b|\bwhere\b",
    "pin": r"\bpin\b",
    "receipt": r"\breceipt\b",
    "request": r"\belse\b|\bnext\b|\bmore\b",
}
"""The words by which the script knows what it is asked for."""
ASK_ORDER, ASK_ADDRESS = "What is the order?", "To which address?"
ASK_PIN, ASK_RECEIPT, ASK_MORE = "What is your PIN?", "What is on the receipt?", "Anything else?"
NOTHING_LEFT = "That is all, thank you."


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldPiece:
    """One thing that the customer can tell."""

    kind: PieceKind
    request: int
    """The number of the request that it belongs to."""
    wordings: tuple[str, ...]


def pieces_of(
    requests: Sequence[Request], caller: str, pin: int, policy: ShopPolicy, *, is_terse: bool
) -> list[ToldPiece]:
    """All that the customer tells, in the order in which it is told when nothing special is asked."""
    found: list[ToldPiece] = []

    def add(kind: PieceKind, number: int, *wordings: str) -> None:
        found.append(ToldPiece(kind=kind, request=number, wordings=wordings))

    for number, request in enumerate(requests):
        if not is_terse:
            add("request", number, *_whole_request(request))
            continue
        add("request", number, *_short_request(request))
        if request.knows_order:
            add("order", number, f"It is {request.order}.", f"Order {request.order}.")
        else:
            add("order", number, f"I only know that it has the {request.item}. I am {caller}.")
        if request.kind == "address":
            add("address", number, f"To {request.wanted}.")
        if policy.verifies and number == 0:
            add("pin", number, f"My PIN is {pin}.", f"It is {pin}.")
        if policy.asks_receipts and request.receipt:
            add("receipt", number, f"It says {request.receipt}.")
    return found


def _whole_request(request: Request) -> tuple[str, ...]:
    order = request.order
    match request.kind:
        case "cancel":
            return (f"Please cancel order {order}.", f"I do not need order {order} any more.")
        case "address":
            return (f"Please send order {order} to {request.wanted}.",)
        case "refund":
            return (f"I want my money back for the {request.item} of order {order}.",)
        case "exchange":
            return (f"I want the {request.wanted}, not the {request.item} of order {order}.{_second_wish(request)}",)


def _short_request(request: Request) -> tuple[str, ...]:
    match request.kind:
        case "cancel":
            return ("I want to cancel an order.", "I do not need an order any more.")
        case "address":
            return ("An order must go to another address.",)
        case "refund":
            return (f"I want my money back for the {request.item}.",)
        case "exchange":
            return (f"I want the {request.wanted}, not the {request.item}.{_second_wish(request)}",)


def _second_wish(request: Request) -> str:
    return " If you have none, my money back." if request.takes_refund else " I do not want money."


def asked_for(text: str, pieces: Sequence[ToldPiece], told: Sequence[int]) -> list[int]:
    """The pieces that a question asks for: those that it names, else the next one; none when all are told.

    Only the request that was told last is talked about; a piece may be told again.
    """
    current = max((pieces[index].request for index in told), default=-1)
    named = {kind for kind, pattern in _ASKED.items() if re.search(pattern, text, re.IGNORECASE)}
    found = [
        index
        for index, piece in enumerate(pieces)
        if piece.kind in named - {"request"} and (piece.kind == "pin" or piece.request == current)
    ]
    if found:
        return found
    left = [index for index in range(len(pieces)) if index not in told]
    if "request" in named:
        left = [index for index in left if pieces[index].kind == "request"]
    return left[:1]


def say_pieces(pieces: Sequence[ToldPiece], seed: int) -> str:
    """The words for some pieces. The seed chooses among wordings."""
    rng = random.Random(seed)
    return " ".join(rng.choice(piece.wordings) for piece in pieces) or NOTHING_LEFT


def is_told(words: str, piece: ToldPiece) -> bool:
    """Whether what was said holds a piece: all words of one of its wordings, in any order."""
    said = _words_of(words)
    return any(_words_of(wording) <= said for wording in piece.wordings)


def told_unasked(words: str, pieces: Sequence[ToldPiece], allowed: Collection[int]) -> list[int]:
    """The pieces that were told although they were not asked for, such as by a customer who recites all it knows.

    A piece whose words are among those of the `allowed` ones does not count: two requests may sound alike.
    """
    fair = " ".join(wording for index in allowed for wording in pieces[index].wordings)
    return [
        index
        for index, piece in enumerate(pieces)
        if index not in allowed and is_told(words, piece) and not is_told(fair, piece)
    ]


def _words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def brief_customer(pieces: Sequence[ToldPiece]) -> str:
    """What a model is told that plays the customer."""
    lines = [f"- {piece.wordings[0]}" for piece in pieces]
    return "\n".join(
        [
            "You are a customer of a shop and talk to its clerk. You say, in this order:",
            *lines,
            "Begin with the first line. Tell another one only when the clerk asks for it.",
            f"Use one short sentence, and no other facts. When all is told, say: {NOTHING_LEFT}",
        ]
    )


WriteCall = Callable[..., str]
"""Writes a tool call in the protocol of the world: name and arguments."""


def expert_replies(
    data: ShopData, policy: ShopPolicy, caller: dict[str, Any], requests: Sequence[Request], write: WriteCall
) -> list[str]:
    """What a clerk says who asks for what is needed, makes every check, and keeps to the rules.

    Args:
        caller: `name` and `pin` of the customer, and whether it tells one thing at a time (`is_terse`) and may have
            several requests (`may_go_on`).
    """
    replies: list[str] = []
    is_terse, is_verified = caller["is_terse"], not policy.verifies
    for request in requests:
        decision = decide(policy, data, request, caller["pin"])
        if is_terse:
            replies.append(ASK_ORDER)
        if is_terse and not request.knows_order:
            replies.append(write("find_customer", name=caller["name"]))
        replies.append(write("find_order", order=request.order))
        if not is_verified:
            replies += [ASK_PIN, write("verify", order=request.order, pin=caller["pin"])]
            is_verified = True
        if decision.tool == "change_address" and is_terse:
            replies.append(ASK_ADDRESS)
        if decision.looks_at_stock:
            replies.append(write("check_stock", item=request.wanted))
        if decision.needs_receipt:
            replies += [ASK_RECEIPT, write("check_receipt", order=request.order, receipt=request.receipt)]
        replies.append(write(decision.tool, **decision.arguments))
        if caller["may_go_on"]:
            replies.append(ASK_MORE)
    return [*replies, write("close")]
