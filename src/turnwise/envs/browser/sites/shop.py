"""A shop: products in categories, search, a cart with quantities, coupons, checkout, reviews."""

from __future__ import annotations

import random
import sqlite3
from functools import partial
from typing import ClassVar

from turnwise.envs.browser.expert import choose, click, fill
from turnwise.envs.browser.gateway import WebRequest, WebResponse
from turnwise.envs.browser.sites.markup import area, choice, field, form, heading, link, paragraph, table, text, tick
from turnwise.envs.browser.sites.site import (
    Chore,
    RefusedError,
    Site,
    redirect,
    required,
    route,
    whole_number,
)

_KINDS = {
    "Kitchen": ("mug", "bowl", "pan", "kettle", "spoon", "plate"),
    "Garden": ("spade", "rake", "hose", "pot", "lantern", "bench"),
    "Office": ("pen", "lamp", "desk", "folder", "stapler", "clock"),
    "Travel": ("bag", "tent", "bottle", "torch", "map", "pillow"),
}
_LOOKS = ("red", "blue", "green", "black", "white", "yellow", "small", "large", "light", "heavy", "plain", "folding")
_PEOPLE = ("Ada Moss", "Ben Reed", "Cleo Hart", "Dan Pike", "Eve Stone", "Finn Vale", "Gia Wolf", "Hugo Lane")
_STREETS = ("Mill Road 4", "Oak Street 12", "Lake View 7", "Station Road 31", "High Street 2", "Park Lane 18")
_CITIES = ("Norwich", "Bergen", "Utrecht", "Graz", "Porto", "Tampere")
_COUPONS = ("SPRING5", "HELLO10", "THANKS7")
SHIPPING = ("Standard", "Express", "Pick up")


class Shop(Site):
    """The site `shop`."""

    name: ClassVar[str] = "shop"
    title: ClassVar[str] = "Corner Shop"
    navigation = {"Home": "/", "Cart": "/cart", "Orders": "/orders"}  # noqa: RUF012 - never changed
    schema = """
        CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER, stock INTEGER);
        CREATE TABLE cart (product INTEGER PRIMARY KEY, quantity INTEGER);
        CREATE TABLE coupons (code TEXT PRIMARY KEY, percent INTEGER);
        CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT, street TEXT, city TEXT, shipping TEXT, is_gift INTEGER,
            coupon TEXT, total INTEGER);
        CREATE TABLE lines (order_id INTEGER, product INTEGER, quantity INTEGER);
        CREATE TABLE reviews (product INTEGER, stars INTEGER, body TEXT);
        CREATE TABLE settings (coupon TEXT);
        INSERT INTO settings VALUES ('');
    """
    facts = {  # noqa: RUF012
        "cart": "SELECT product, quantity FROM cart",
        "coupon": "SELECT coupon FROM settings",
        "order": """SELECT o.name, street, city, shipping, is_gift, coupon, total,
            (SELECT group_concat(product || 'x' || quantity) FROM (SELECT * FROM lines WHERE order_id = o.id
             ORDER BY product)) FROM orders o""",
        "review": "SELECT product, stars, body FROM reviews",
    }

    def fill(self, rng: random.Random, level: int) -> None:
        kinds = [(thing, category) for category, things in _KINDS.items() for thing in things]
        names = [(f"{look} {thing}", category) for thing, category in kinds for look in _LOOKS]
        if level == 0:  # one word each, so that a model without words can know all of them
            names = kinds
        for name, category in rng.sample(names, (4, 4, 12, 24, 40, 60)[level]):
            self.change(
                "INSERT INTO products (name, category, price, stock) VALUES (?, ?, ?, ?)",
                name.capitalize(),
                category,
                rng.randint(2, 90),
                rng.randint(3, 9),
            )
        for code, percent in zip(_COUPONS, (5, 10, 7), strict=True):
            self.change("INSERT INTO coupons VALUES (?, ?)", code, percent)

    # --- what can be done

    def add_to_cart(self, product: int, quantity: int) -> None:
        stock = self.found("SELECT stock FROM products WHERE id = ?", product)["stock"]
        held = self.row("SELECT quantity FROM cart WHERE product = ?", product)
        if quantity + (held["quantity"] if held else 0) > stock:
            raise RefusedError(f"Only {stock} are left.")
        self.change(
            "INSERT INTO cart VALUES (?, ?) "
            "ON CONFLICT (product) DO UPDATE SET quantity = quantity + excluded.quantity",
            product,
            quantity,
        )

    def remove_from_cart(self, product: int) -> None:
        self.change("DELETE FROM cart WHERE product = ?", product)

    def use_coupon(self, code: str) -> None:
        self.found("SELECT 1 FROM coupons WHERE code = ?", code)
        self.change("UPDATE settings SET coupon = ?", code)

    def total(self) -> int:
        """In cents, after the coupon."""
        asked = "SELECT coalesce(sum(price * quantity), 0) AS sum FROM cart JOIN products ON id = product"
        percent = self.row("SELECT percent FROM coupons JOIN settings ON code = coupon")
        return self.found(asked)["sum"] * (100 - (percent["percent"] if percent else 0))

    def place_order(self, name: str, street: str, city: str, shipping: str, *, is_gift: bool) -> None:
        if not self.rows("SELECT 1 FROM cart"):
            raise RefusedError("The cart is empty.")
        if shipping not in SHIPPING:
            raise RefusedError("Choose a way of shipping.")
        order = self.change(
            "INSERT INTO orders (name, street, city, shipping, is_gift, coupon, total) "
            "SELECT ?, ?, ?, ?, ?, coupon, ? FROM settings",
            name,
            street,
            city,
            shipping,
            int(is_gift),
            self.total(),
        )
        self.change("INSERT INTO lines SELECT ?, product, quantity FROM cart", order)
        self.change("DELETE FROM cart")
        self.change("UPDATE settings SET coupon = ''")

    def review(self, product: int, stars: int, body: str) -> None:
        self.change("INSERT INTO reviews VALUES (?, ?, ?)", product, stars, body)

    # --- pages

    def header(self) -> str:
        return form("/search", "Search", field("Find", "q"), method="get")

    @route("/")
    def home(self, _: WebRequest) -> WebResponse:
        parts = [link(row["category"], f"/category/{row['category']}") + "<br>" for row in self._categories()]
        if len(self.rows("SELECT 1 FROM products")) <= 12:
            parts.append(self._listing("SELECT * FROM products ORDER BY name"))
        return self.show("Welcome", parts)

    @route("/category/<name>")
    def category(self, _: WebRequest, name: str) -> WebResponse:
        rows = self.rows("SELECT * FROM products WHERE category = ? ORDER BY name", name)
        links = [link(_with_price(row), f"/product/{row['id']}") + "<br>" for row in rows]
        return self.show(name, links or [paragraph("Nothing was found.")])

    @route("/search")
    def search(self, request: WebRequest) -> WebResponse:
        words = request.query.get("q", "").strip()
        listing = self._listing("SELECT * FROM products WHERE name LIKE ? ORDER BY name", f"%{words}%")
        return self.show(f"Results for {words}", [listing])

    @route("/product/<number>")
    def product(self, _: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM products WHERE id = ?", number)
        reviews = self.rows("SELECT * FROM reviews WHERE product = ?", number)
        stars = [str(count) for count in range(1, 6)]
        return self.show(
            row["name"],
            [
                paragraph(f"${row['price']}, {row['stock']} in stock"),
                form(f"/cart/add/{number}", "Add to cart", field("Quantity", "quantity", 1)),
                heading("Reviews"),
                *(paragraph(f"{one['stars']} stars: {one['body']}") for one in reviews),
                form(f"/review/{number}", "Send review", choice("Stars", "stars", stars), area("Review", "body")),
            ],
        )

    @route("/cart/add/<number>")
    def post_add(self, request: WebRequest, number: str) -> WebResponse:
        self.add_to_cart(int(number), whole_number(request.form.get("quantity", ""), 1, 99))
        self.say("Added to the cart.")
        return redirect("/cart")

    @route("/cart/remove/<number>")
    def post_remove(self, _: WebRequest, number: str) -> WebResponse:
        self.remove_from_cart(int(number))
        return redirect("/cart")

    @route("/coupon")
    def post_coupon(self, request: WebRequest) -> WebResponse:
        self.use_coupon(*required(request, "code"))
        self.say("The coupon is used.")
        return redirect("/cart")

    @route("/cart")
    def cart(self, _: WebRequest) -> WebResponse:
        rows = self.rows("SELECT * FROM cart JOIN products ON id = product ORDER BY name")
        lines = [
            (text(row["name"]), text(row["quantity"]), form(f"/cart/remove/{row['id']}", f"Remove {row['name']}"))
            for row in rows
        ]
        coupon = self.found("SELECT coupon FROM settings")["coupon"]
        return self.show(
            "Cart",
            [
                table(("Product", "Quantity", ""), lines) if lines else paragraph("The cart is empty."),
                paragraph(f"Total ${self.total() / 100:.2f}" + (f" with {coupon}" if coupon else "")),
                form("/coupon", "Use coupon", field("Coupon", "code")),
                link("Check out", "/checkout") if lines else "",
            ],
        )

    @route("/checkout")
    def checkout(self, _: WebRequest) -> WebResponse:
        fields = [field("Name", "name"), field("Street", "street"), field("City", "city")]
        more = [choice("Shipping", "shipping", SHIPPING), tick("Wrap as a gift", "gift")]
        return self.show("Checkout", [form("/order", "Place order", *fields, *more)])

    @route("/order")
    def post_order(self, request: WebRequest) -> WebResponse:
        name, street, city, shipping = required(request, "name", "street", "city", "shipping")
        self.place_order(name, street, city, shipping, is_gift=bool(request.form.get("gift")))
        self.say("Thank you for your order.")
        return redirect("/orders")

    @route("/review/<number>")
    def post_review(self, request: WebRequest, number: str) -> WebResponse:
        stars, body = required(request, "stars", "body")
        self.review(int(number), whole_number(stars, 1, 5), body)
        self.say("Thank you for your review.")
        return redirect(f"/product/{number}")

    @route("/orders")
    def orders(self, _: WebRequest) -> WebResponse:
        rows = self.rows("SELECT * FROM orders ORDER BY id")
        lines = [(text(r["id"]), text(r["name"]), text(r["shipping"]), f"${r['total'] / 100:.2f}") for r in rows]
        return self.show("Orders", [table(("Order", "Name", "Shipping", "Total"), lines)])

    def _categories(self) -> list[dict[str, str]]:
        return [dict(row) for row in self.rows("SELECT DISTINCT category FROM products ORDER BY category")]

    def _listing(self, sql: str, *values: object) -> str:
        rows = self.rows(sql, *values)
        if not rows:
            return paragraph("Nothing was found.")
        return table(
            ("Product", "Price"), ((link(row["name"], f"/product/{row['id']}"), f"${row['price']}") for row in rows)
        )

    # --- what a task may ask for

    def chores(self, level: int, rng: random.Random) -> list[Chore]:
        products = rng.sample(self.rows("SELECT * FROM products ORDER BY id"), min(4, 2 + level // 2))
        if level <= 1:
            return [self._put(products[0]["name"], products[0]["id"], 1, is_near=True)]
        if level == 2:
            return [self._put(products[0]["name"], products[0]["id"], rng.randint(2, 3))]
        first = self._put(products[0]["name"], products[0]["id"], rng.randint(1, 3))
        if level == 3:
            return [first, self._order(rng)]
        others = [self._put(row["name"], row["id"], rng.randint(1, 2)) for row in products[1 : level - 2]]
        cheapest = self._put_cheapest(rng, {row["category"] for row in products})
        if level == 4:
            return [first, *others, self._coupon(rng), self._order(rng)]
        return [first, *others, *cheapest, self._coupon(rng), self._order(rng), self._review(products[0], rng)]

    def _put(self, name: str, number: int, quantity: int, *, is_near: bool = False) -> Chore:
        way = [click("link", name)] if is_near else [fill("Find", name), click("button", "Search"), click("link", name)]
        count = [fill("Quantity", quantity)] if quantity > 1 else []
        return Chore(
            text=f"Add {quantity} x {name} to the cart.",
            steps=[*way, *count, click("button", "Add to cart")],
            effect=partial(_add, number=number, quantity=quantity),
        )

    def _put_cheapest(self, rng: random.Random, taken: set[str]) -> list[Chore]:
        """The cheapest product of a category, where there is one cheapest."""
        free = [one["category"] for one in self._categories() if one["category"] not in taken]
        for category in rng.sample(free, len(free)):
            rows = self.rows("SELECT * FROM products WHERE category = ? ORDER BY price LIMIT 2", category)
            if len(rows) == 2 and rows[0]["price"] < rows[1]["price"]:
                way = [click("link", "Home"), click("link", category), click("link", _with_price(rows[0]))]
                effect = partial(_add, number=rows[0]["id"], quantity=1)
                goal = f"Add the cheapest product of {category} to the cart."
                return [Chore(text=goal, steps=[*way, click("button", "Add to cart")], effect=effect)]
        return []

    def _coupon(self, rng: random.Random) -> Chore:
        code = rng.choice(_COUPONS)
        return Chore(
            text=f"Use the coupon {code}.",
            steps=[click("link", "Cart"), fill("Coupon", code), click("button", "Use coupon")],
            effect=lambda site: site.use_coupon(code),
        )

    def _order(self, rng: random.Random) -> Chore:
        name, street, city = rng.choice(_PEOPLE), rng.choice(_STREETS), rng.choice(_CITIES)
        shipping, is_gift = rng.choice(SHIPPING), rng.random() < 0.5
        gift = [click("checkbox", "Wrap as a gift")] if is_gift else []
        return Chore(
            text=f"Check out for {name}, {street}, {city}, with shipping {shipping}"
            + (", wrapped as a gift." if is_gift else "."),
            steps=[
                click("link", "Cart"),
                click("link", "Check out"),
                fill("Name", name),
                fill("Street", street),
                fill("City", city),
                choose("Shipping", shipping),
                *gift,
                click("button", "Place order"),
            ],
            effect=lambda site: site.place_order(name, street, city, shipping, is_gift=is_gift),
        )

    def _review(self, product: sqlite3.Row, rng: random.Random) -> Chore:
        name, number = product["name"], product["id"]
        stars, body = rng.randint(1, 5), rng.choice(("Works well", "Arrived late", "As described", "Too small"))
        return Chore(
            text=f"Then review {name} with {stars} stars and the words '{body}'.",
            steps=[
                fill("Find", name),
                click("button", "Search"),
                click("link", name),
                choose("Stars", str(stars)),
                fill("Review", body),
                click("button", "Send review"),
            ],
            effect=lambda site: site.review(number, stars, body),
        )


def _with_price(product: sqlite3.Row) -> str:
    """The name of a link with its price, for observations that show elements only."""
    return f"{product['name']}, ${product['price']}"


def _add(site: Shop, number: int, quantity: int) -> None:
    site.add_to_cart(number, quantity)
