"""A shop's database, drawn from a seed: the default for questions over several tables.

suppliers(id, name, country)            categories(id, name, shelf)
products(id, name, price, stock, category_id -> categories.id, supplier_id -> suppliers.id)
customers(id, name, city, age)          orders(id, day, status, customer_id -> customers.id)
order_lines(id, quantity, discount, order_id -> orders.id, product_id -> products.id)
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from turnwise.envs.library.sql_databases import NAMES, WORDS
from turnwise.envs.splits import random_for

NUM_CUSTOMERS, NUM_PRODUCTS, NUM_ORDERS, NUM_LINES = 60, 48, 260, 700

_SCHEMA = """
CREATE TABLE suppliers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, country TEXT NOT NULL);
CREATE TABLE categories (id INTEGER PRIMARY KEY, name TEXT NOT NULL, shelf INTEGER NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price REAL NOT NULL, stock INTEGER NOT NULL,
    category_id INTEGER NOT NULL REFERENCES categories (id), supplier_id INTEGER NOT NULL REFERENCES suppliers (id));
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, age INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, day TEXT NOT NULL, status TEXT NOT NULL,
    customer_id INTEGER NOT NULL REFERENCES customers (id));
CREATE TABLE order_lines (id INTEGER PRIMARY KEY, quantity INTEGER NOT NULL, discount INTEGER NOT NULL,
    order_id INTEGER NOT NULL REFERENCES orders (id), product_id INTEGER NOT NULL REFERENCES products (id));
"""
_CATEGORIES = ("tea", "tools", "toys", "books", "shoes", "lamps", "paper", "plants")
_SUPPLIERS = ("Nordal", "Pexa", "Quill", "Rivers", "Sonnet", "Tindra", "Umber", "Vale", "Wicker", "Yarrow")
_GOODS = ("basic", "large", "small", "red", "blue", "old", "fine", "plain")
_SURNAMES = ("Berg", "Cole", "Dahl", "Egan", "Frost", "Gray", "Holt", "Innes", "Jung", "Kerr")
_STATUSES = ("open", "paid", "sent", "returned")


def write_shop(path: Path, seed: int) -> None:
    """Write the database to a file. The same seed gives the same rows on every machine."""
    rng = random_for("shop", seed)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    with closing(sqlite3.connect(part)) as connection:
        connection.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {_SCHEMA}")
        for table, rows in _draw_rows(rng).items():
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        connection.commit()
    part.chmod(0o644)
    os.replace(part, path)  # noqa: PTH105 - whole or not at all, whoever else writes it now


def _draw_rows(rng: random.Random) -> dict[str, Sequence[Sequence[object]]]:
    countries, cities = WORDS["country"], WORDS["city"]
    names = rng.sample([f"{first} {last}" for first in NAMES for last in _SURNAMES], NUM_CUSTOMERS)
    goods = rng.sample([f"{word} {name}" for word in _GOODS for name in _CATEGORIES], NUM_PRODUCTS)
    suppliers = [(n, name, rng.choice(countries)) for n, name in enumerate(_SUPPLIERS, start=1)]
    categories = [(n, name, rng.randint(1, 6)) for n, name in enumerate(_CATEGORIES, start=1)]
    products = [
        (n, name, rng.randint(100, 9999) / 100, rng.randint(0, 80), rng.randint(1, 8), rng.randint(1, 10))
        for n, name in enumerate(goods, start=1)
    ]
    customers = [
        (n, name, rng.choice(cities), rng.randint(18, 80) if rng.random() < 0.9 else None)
        for n, name in enumerate(names, start=1)
    ]
    orders = [
        (
            n,
            f"2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            rng.choice(_STATUSES),
            rng.randint(1, NUM_CUSTOMERS),
        )
        for n in range(1, NUM_ORDERS + 1)
    ]
    lines = [
        (n, rng.randint(1, 12), rng.choice((0, 0, 0, 5, 10, 20)), rng.randint(1, NUM_ORDERS), rng.randint(1, 46))
        for n in range(1, NUM_LINES + 1)  # the last two products are never ordered, for questions about that
    ]
    return {
        "suppliers": suppliers,
        "categories": categories,
        "products": products,
        "customers": customers,
        "orders": orders,
        "order_lines": lines,
    }
