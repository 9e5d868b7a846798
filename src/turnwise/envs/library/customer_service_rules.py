"""The rules of the desk in `customer_service`: what the policy allows, and the tools that change the database.

A tool does what it is told, also what the rules forbid: keeping to the rules is the clerk's work. `ServiceDesk` writes
down every call that broke a rule (`violations`). A tool refuses only what makes no sense, such as an order that does
not exist.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from turnwise.envs.library.customer_service_shop import TODAY, Request, ShopData, ShopOrder, price_of
from turnwise.envs.tools import Toolbox, ToolError, tool

Reason = Literal["not_verified", "shipped", "not_delivered", "too_late", "no_receipt", "no_stock"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopPolicy:
    """The rules of one attempt."""

    refund_days: int = 14
    """Days after the delivery in which things may come back, for a refund or an exchange."""
    member_days: int = 30
    """The same for members."""
    receipt_over: int = 50
    """A refund of a thing above this price needs the receipt."""
    verifies: bool = False
    """Nothing may change before the customer's PIN was checked."""
    asks_receipts: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def days_for(self, *, is_member: bool) -> int:
        return self.member_days if is_member else self.refund_days

    def needs_receipt(self, item: str) -> bool:
        return self.asks_receipts and price_of(item) > self.receipt_over

    def to_text(self, *, has_returns: bool) -> str:
        """The rules in words; those about things that come back only where customers may ask for that."""
        lines = [f"Today is day {TODAY}.", "Cancel or change the address only while processing; else refuse: shipped."]
        if has_returns:
            days = f"up to {self.refund_days} days ago, for members {self.member_days}"
            lines += [
                f"Refund or exchange only what was delivered (else: not_delivered) {days} (else: too_late).",
                "Exchange only for what is in stock; else refund if the customer agrees, or refuse: no_stock.",
            ]
        if self.asks_receipts:
            lines.append(f"Refunds above {self.receipt_over} need check_receipt first; wrong: no_receipt.")
        if self.verifies:
            lines.append("Verify the PIN before any change; wrong: refuse every request as not_verified.")
        return " ".join(lines)


def draw_policy(rng: random.Random, plain: ShopPolicy) -> ShopPolicy:
    """The same kind of policy with other numbers."""
    days = rng.choice((7, 10, 14, 21))
    return ShopPolicy(
        refund_days=days,
        member_days=days + rng.choice((7, 14, 30)),
        receipt_over=rng.choice((18, 25, 50, 80)),
        verifies=plain.verifies,
        asks_receipts=plain.asks_receipts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the rules say of a request: the call that settles it."""

    tool: str
    arguments: Mapping[str, Any]
    needs_receipt: bool = False
    """The receipt is checked first."""
    looks_at_stock: bool = False

    def checks(self, policy: ShopPolicy) -> set[str]:
        """The checks without which it is a guess, as `ServiceDesk.checked` has them."""
        found = {"verify"} if policy.verifies else set[str]()
        return found | {f"check_receipt {self.arguments['order']}"} if self.needs_receipt else found


def decide(policy: ShopPolicy, data: ShopData, request: Request, pin: int) -> Decision:
    """What a clerk must do about a request of somebody who says this PIN. The rules stand in the order of checks."""
    order = data.orders[request.order]
    customer = data.customers[order.customer]

    def refusal(reason: Reason, **needs: bool) -> Decision:
        return Decision(tool="refuse", arguments={"order": request.order, "reason": reason}, **needs)

    if policy.verifies and pin != customer.pin:
        return refusal("not_verified")
    if request.kind in ("cancel", "address"):
        if order.status != "processing":
            return refusal("shipped")
        if request.kind == "cancel":
            return Decision(tool="cancel", arguments={"order": request.order})
        return Decision(tool="change_address", arguments={"order": request.order, "address": request.wanted})
    if order.status != "delivered":
        return refusal("not_delivered")
    if TODAY - order.day > policy.days_for(is_member=customer.is_member):
        return refusal("too_late")
    looks = request.kind == "exchange"
    if looks and data.stock[request.wanted]:
        wanted = {"order": request.order, "item": request.item, "new_item": request.wanted}
        return Decision(tool="exchange", arguments=wanted, looks_at_stock=True)
    if looks and not request.takes_refund:
        return refusal("no_stock", looks_at_stock=True)
    needs = policy.needs_receipt(request.item)
    if needs and request.receipt != order.receipt:
        return refusal("no_receipt", needs_receipt=True, looks_at_stock=looks)
    paid = {"order": request.order, "item": request.item}
    return Decision(tool="refund", arguments=paid, needs_receipt=needs, looks_at_stock=looks)


class ServiceDesk:
    """The tools of one attempt, over its own database."""

    def __init__(self, data: ShopData, policy: ShopPolicy) -> None:
        self.data = data
        self.policy = policy
        self.violations: list[str] = []
        """Calls that broke a rule."""
        self.verified = ""
        """The name of the customer whose PIN was right."""
        self.receipts: list[int] = []
        """Orders whose receipt was right."""
        self.checked: list[str] = []
        """The checks that were made, with whatever answer: `verify`, `check_receipt 412`."""
        self.is_closed = False

    def copy(self) -> ServiceDesk:
        twin = ServiceDesk(self.data.copy(), self.policy)
        twin.violations, twin.receipts = list(self.violations), list(self.receipts)
        twin.checked = list(self.checked)
        twin.verified, twin.is_closed = self.verified, self.is_closed
        return twin

    def toolbox(self, names: Sequence[str]) -> Toolbox:
        return Toolbox(*(getattr(self, name) for name in names))

    @tool
    def find_order(self, order: int) -> str:
        """Show an order."""
        found = self._order(order)
        items = ", ".join(f"{item} {price_of(item)}" for item in found.items)
        member = " (member)" if self.data.customers[found.customer].is_member else ""
        return f"{found.customer}{member}: {items}; {found.status} on day {found.day}; to {found.address}"

    @tool
    def find_customer(self, name: str) -> str:
        """List the orders of a customer."""
        own = {number: order for number, order in self.data.orders.items() if order.customer == name}
        if not own:
            raise ToolError(f"no customer {name[:40]!r}")
        return "; ".join(f"{number}: {', '.join(order.items)}" for number, order in own.items())

    @tool
    def check_stock(self, item: str) -> str:
        """Say how many of a thing there are."""
        return f"{self.data.stock[self._known(item)]} in stock"

    @tool
    def verify(self, order: int, pin: int) -> str:
        """Check the PIN of the customer of an order."""
        customer = self.data.customers[self._order(order).customer]
        self.checked = sorted({*self.checked, "verify"})
        if customer.pin != pin:
            return "wrong PIN"
        self.verified = customer.name
        return f"{customer.name} is verified"

    @tool
    def check_receipt(self, order: int, receipt: str) -> str:
        """Check the receipt number of an order."""
        is_right = self._order(order).receipt == receipt
        self.checked = sorted({*self.checked, f"check_receipt {order}"})
        if not is_right:
            return "wrong receipt"
        self.receipts = sorted({*self.receipts, order})
        return "right receipt"

    @tool
    def cancel(self, order: int) -> str:
        """Cancel an order."""
        found = self._order(order)
        if found.status == "cancelled":
            raise ToolError(f"order {order} is cancelled already")
        self._hold("cancel", found, found.status == "processing")
        found.status = "cancelled"
        return f"order {order} is cancelled"

    @tool
    def change_address(self, order: int, address: str) -> str:
        """Send an order to another address."""
        found = self._order(order)
        self._hold("change_address", found, found.status == "processing")
        found.address = address[:80]
        return f"order {order} goes to {found.address}"

    @tool
    def refund(self, order: int, item: str) -> str:
        """Take a thing back and pay for it."""
        found = self._order(order, item)
        has_proof = not self.policy.needs_receipt(item) or order in self.receipts
        self._hold("refund", found, self._is_in_time(found) and has_proof)
        found.items.remove(item)
        self.data.refunds = sorted([*self.data.refunds, [order, item, price_of(item)]])
        return f"{price_of(item)} paid back"

    @tool
    def exchange(self, order: int, item: str, new_item: str) -> str:
        """Take a thing back and send another one of its kind."""
        found = self._order(order, item)
        if self._known(new_item).split()[-1] != item.rsplit(maxsplit=1)[-1]:
            raise ToolError(f"{new_item} is no {item.rsplit(maxsplit=1)[-1]}")
        if not self.data.stock[new_item]:
            raise ToolError(f"no {new_item} in stock")
        self._hold("exchange", found, self._is_in_time(found))
        found.items[found.items.index(item)] = new_item
        self.data.stock[new_item] -= 1
        return f"{new_item} is on its way"

    @tool
    def refuse(self, order: int, reason: Reason) -> str:
        """Refuse what the customer wants of an order."""
        self._order(order)
        self.data.refusals = sorted([*self.data.refusals, [order, reason]])
        return "refusal noted"

    @tool
    def close(self) -> str:
        """End the conversation, when every request is settled."""
        self.is_closed = True
        return "closed"

    def _order(self, number: int, item: str | None = None) -> ShopOrder:
        found = self.data.orders.get(number)
        if found is None:
            raise ToolError(f"no order {number}")
        if item is not None and item not in found.items:
            raise ToolError(f"order {number} has no {item[:40]!r}")
        return found

    def _known(self, item: str) -> str:
        if item not in self.data.stock:
            raise ToolError(f"the shop has no {item[:40]!r}")
        return item

    def _is_in_time(self, order: ShopOrder) -> bool:
        days = self.policy.days_for(is_member=self.data.customers[order.customer].is_member)
        return order.status == "delivered" and TODAY - order.day <= days

    def _hold(self, name: str, order: ShopOrder, is_allowed: bool) -> None:
        """Write down a change that the rules forbid."""
        is_known = not self.policy.verifies or self.verified == order.customer
        if not (is_allowed and is_known):
            self.violations.append(name)
