"""The shop of the world `customer_service`: its customers, orders and stock, and what its customers ask for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

TODAY = 100
"""Days are numbers. This is the day of every attempt."""

COLOURS = ("red", "blue", "green", "black", "white")
PRICES: Mapping[str, int] = {
    "mug": 9,
    "cap": 15,
    "scarf": 20,
    "shirt": 30,
    "lamp": 45,
    "bag": 60,
    "jacket": 90,
    "chair": 120,
}
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea", "Max", "Nora", "Otto")
STREETS = ("Oak Street", "Mill Lane", "High Street", "Park Road", "Lake Drive", "Hill Road")

RequestKind = Literal["cancel", "address", "refund", "exchange"]
REQUEST_KINDS: tuple[RequestKind, ...] = get_args(RequestKind)
Status = Literal["processing", "shipped", "delivered", "cancelled"]


@dataclass(slots=True, kw_only=True)
class Customer:
    name: str
    pin: int
    is_member: bool


@dataclass(slots=True, kw_only=True)
class ShopOrder:
    customer: str
    """The customer's name; no two have the same."""
    status: Status
    day: int
    """The day of the last change of the status, such as the delivery."""
    address: str
    items: list[str]
    receipt: str


def price_of(item: str) -> int:
    """The price of a thing, such as `red mug`. It does not depend on the colour."""
    return PRICES[item.rsplit(maxsplit=1)[-1]]


@dataclass(slots=True, kw_only=True)
class ShopData:
    """The database of one attempt. Two of them are equal if nothing in them differs."""

    customers: dict[str, Customer]
    orders: dict[int, ShopOrder]
    stock: dict[str, int]
    """How many there are, by thing."""
    refunds: list[list[Any]] = field(default_factory=list[list[Any]])
    """What was paid back: order, thing, amount; sorted, because their order does not matter."""
    refusals: list[list[Any]] = field(default_factory=list[list[Any]])
    """What was refused: order and reason; sorted."""

    def copy(self) -> ShopData:
        return deepcopy(self)

    def to_json(self) -> dict[str, Any]:
        return {
            "customers": [asdict(customer) for customer in self.customers.values()],
            "orders": [[number, asdict(order)] for number, order in self.orders.items()],
            "stock": dict(self.stock),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShopData:
        """The shop as it was drawn, before anything was paid back or refused."""
        return cls(
            customers={row["name"]: Customer(**row) for row in data["customers"]},
            orders={number: ShopOrder(**deepcopy(row)) for number, row in data["orders"]},
            stock=dict(data["stock"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that the customer wants, with all that the customer knows about it."""

    kind: RequestKind
    order: int
    item: str = ""
    """For a refund or an exchange."""
    wanted: str = ""
    """The new address, or the thing in exchange."""
    receipt: str = ""
    """The receipt number that the customer has. It may be wrong."""
    takes_refund: bool = False
    """If the thing in exchange is not there, the customer wants the money back."""
    knows_order: bool = True
    """Without the order's number, the customer names the thing that was bought."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopSize:
    """How much there is in a shop, and how tricky its requests are."""

    num_customers: int
    num_requests: int
    kinds: tuple[RequestKind, ...]
    refused_share: float
    """About how many requests meet a rule that forbids them."""
    first_order: int
    """Numbers of orders go from here to ten times as much: 1 gives numbers of one digit."""
    hides_order: bool
    """Some customers do not know the number of their order."""


def draw_shop(rng: random.Random, size: ShopSize, num_requests: int) -> tuple[ShopData, str, list[Request]]:
    """Draw a shop, the name of the customer who calls, and what that customer wants, each about another order."""
    names = rng.sample(NAMES, size.num_customers)
    caller = names[0]
    customers = {name: _draw_customer(rng, name) for name in names}
    numbers = rng.sample(
        range(size.first_order, 10 * size.first_order), num_requests + 2 * (size.num_customers - 1) + 1
    )
    owners = [caller] * (num_requests + 1) + [name for name in names[1:] for _ in range(2)]
    things = [f"{colour} {thing}" for thing in PRICES for colour in COLOURS]
    bought = iter(rng.sample(things, len(things)))
    orders = {number: _draw_order(rng, owner, bought) for number, owner in zip(numbers, owners, strict=True)}
    stock = {thing: rng.choice((0, 3, 5, 8)) for thing in things}
    data = ShopData(customers=customers, orders={n: orders[n] for n in sorted(orders)}, stock=stock)
    requests = [_draw_request(rng, data, number, size) for number in numbers[:num_requests]]
    return data, caller, requests


def _draw_customer(rng: random.Random, name: str) -> Customer:
    return Customer(name=name, pin=rng.randrange(1000, 10_000), is_member=rng.random() < 0.4)


def _draw_order(rng: random.Random, owner: str, bought: Any) -> ShopOrder:
    return ShopOrder(
        customer=owner,
        status=rng.choice(("processing", "shipped", "delivered")),
        day=TODAY - rng.randrange(1, 90),
        address=draw_address(rng),
        items=[next(bought) for _ in range(rng.choice((1, 2)))],
        receipt=_draw_receipt(rng),
    )


def draw_address(rng: random.Random) -> str:
    return f"{rng.randrange(1, 99)} {rng.choice(STREETS)}"


def _draw_receipt(rng: random.Random) -> str:
    return f"R{rng.randrange(100, 1000)}"


def _draw_request(rng: random.Random, data: ShopData, number: int, size: ShopSize) -> Request:
    """Draw a request, and change its order so that rules forbid about `refused_share` of all requests."""
    kind, order = rng.choice(size.kinds), data.orders[number]
    is_refused = rng.random() < size.refused_share
    knows_order = not size.hides_order or rng.random() < 0.5
    if kind in ("cancel", "address"):
        order.status = rng.choice(("shipped", "delivered")) if is_refused else "processing"
        wanted = draw_address(rng) if kind == "address" else ""
        while wanted == order.address:
            wanted = draw_address(rng)
        return Request(kind=kind, order=number, wanted=wanted, item=order.items[0], knows_order=knows_order)
    item = rng.choice(order.items)
    colour, thing = item.split()
    wanted = f"{rng.choice([other for other in COLOURS if other != colour])} {thing}" if kind == "exchange" else ""
    order.status, order.day = "delivered", TODAY - rng.randrange(1, 14)
    receipt = order.receipt
    if kind == "exchange" and not is_refused:
        data.stock[wanted] = max(3, data.stock[wanted])
    if is_refused:
        match rng.choice(("window", "status", "proof", "proof")):
            case "status":
                order.status = rng.choice(("processing", "shipped"))
            case "proof" if kind == "exchange":
                data.stock[wanted] = 0
            case "proof" if price_of(item) > 50:
                receipt = _draw_receipt(rng)
            case _:
                order.day = TODAY - rng.randrange(20, 90)
    return Request(
        kind=kind,
        order=number,
        item=item,
        wanted=wanted,
        receipt=receipt,
        takes_refund=kind == "exchange" and rng.random() < 0.5,
        knows_order=knows_order,
    )
