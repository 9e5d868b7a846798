from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from turnwise.envs.library.sql_files import find_databases, open_read_only, read_file_schema, write_changed_copy
from turnwise.envs.library.sql_schema import Link
from turnwise.envs.library.sql_shop import write_shop
from turnwise.errors import ConfigError

LIBRARY = """
CREATE TABLE Author (AuthorId INTEGER PRIMARY KEY, Name TEXT);
CREATE TABLE Book (BookId INTEGER PRIMARY KEY, Title TEXT, Pages INTEGER, AuthorId INTEGER, "order" TEXT);
CREATE TABLE Loan (BookId INTEGER REFERENCES Book, Day TEXT, UNIQUE (BookId, Day));
CREATE TABLE bare (a TEXT);
CREATE TRIGGER t AFTER DELETE ON Book BEGIN DELETE FROM Author; END;
"""


def write_library(path: Path, num_books: int = 60) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(LIBRARY)
        connection.executemany("INSERT INTO Author VALUES (?, ?)", [(n, f"Writer {n}") for n in range(1, 31)])
        books = [(n, f"Book {n}", 50 + n % 17, 1 + n % 30, "x") for n in range(1, num_books + 1)]
        connection.executemany("INSERT INTO Book VALUES (?, ?, ?, ?, ?)", books)
        loans = [(1 + n % num_books, f"2025-01-{1 + n // num_books:02}") for n in range(4 * num_books)]
        connection.executemany("INSERT INTO Loan VALUES (?, ?)", loans)
        connection.commit()
    return path


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return write_library(tmp_path / "library.sqlite")


def test_links_are_read_from_declarations_and_found_in_names_and_values(library: Path) -> None:
    schema = read_file_schema(library)
    assert [table.name for table in schema.tables] == ["Author", "Book", "Loan"]  # the empty one says nothing
    assert schema.table("Book").links == (Link(column="AuthorId", other="Author", target="AuthorId"),)
    assert schema.table("Loan").links == (Link(column="BookId", other="Book", target="BookId"),)
    assert "AuthorId -> Author.AuthorId" in schema.text
    assert '"order" text' in schema.text


def test_a_column_with_a_value_that_is_no_key_is_no_link(library: Path) -> None:
    with closing(sqlite3.connect(library)) as connection:
        connection.execute("UPDATE Book SET AuthorId = 99 WHERE BookId = 1")
        connection.commit()
    assert read_file_schema(library).table("Book").links == ()


def test_a_copy_has_whole_links_and_other_answers_and_leaves_the_file_alone(tmp_path: Path) -> None:
    shop, copy = tmp_path / "shop.sqlite", tmp_path / "copy.sqlite"
    write_shop(shop, seed=3)
    before = shop.read_bytes()
    write_changed_copy(shop, copy, read_file_schema(shop))
    assert shop.read_bytes() == before
    with open_read_only(copy) as connection, open_read_only(shop) as whole:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        for sql in (
            "SELECT COUNT(*) FROM order_lines",
            "SELECT city FROM customers WHERE name = (SELECT MIN(name) FROM customers)",
            "SELECT SUM(price) FROM products JOIN suppliers ON supplier_id = suppliers.id WHERE country = 'Peru'",
        ):
            assert connection.execute(sql).fetchall() != whole.execute(sql).fetchall(), sql
        cities = "SELECT DISTINCT city FROM customers ORDER BY city"
        assert connection.execute(cities).fetchall() == whole.execute(cities).fetchall()


def test_a_file_with_a_write_ahead_log_is_read_and_nothing_appears_beside_it(library: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(library)) as connection:
        assert connection.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    before = library.read_bytes()
    (tmp_path / "out").mkdir()
    write_changed_copy(library, tmp_path / "out" / "copy.sqlite", read_file_schema(library))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library.sqlite", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["copy.sqlite"]
    assert library.read_bytes() == before


def test_triggers_and_unique_pairs_do_not_disturb_the_copy(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    write_changed_copy(library, copy, read_file_schema(library))
    with open_read_only(copy) as connection:
        ((num_authors,), (num_loans,)) = connection.execute(
            "SELECT COUNT(*) FROM Author UNION ALL SELECT COUNT(*) FROM Loan"
        )
    assert 15 < num_authors < 30
    assert 60 < num_loans < 240


def test_the_same_file_gives_the_same_copy(tmp_path: Path) -> None:
    copies = []
    for name in ("one", "two"):
        write_shop(tmp_path / f"{name}.sqlite", seed=0)
        schema = read_file_schema(tmp_path / f"{name}.sqlite")
        write_changed_copy(tmp_path / f"{name}.sqlite", tmp_path / f"{name}-copy.sqlite", schema)
        with open_read_only(tmp_path / f"{name}-copy.sqlite") as connection:
            copies.append("\n".join(connection.iterdump()))
    assert copies[0] == copies[1]


def test_a_folder_gives_all_of_its_files_by_name(library: Path) -> None:
    inner = library.parent / "more" / "second.db"
    inner.parent.mkdir()
    write_library(inner)
    (library.parent / "notes.txt").write_text("nothing")
    assert find_databases(library.parent) == {"library": library, "more/second": inner}
    assert find_databases(library) == {"library": library}


def test_two_files_that_differ_in_their_endings_are_both_there(library: Path) -> None:
    other = write_library(library.with_suffix(".db"))
    assert find_databases(library.parent) == {"library.db": other, "library.sqlite": library}


def test_values_that_an_index_refuses_elsewhere_stay_where_they_are(library: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(library)) as connection:
        connection.execute("CREATE UNIQUE INDEX once ON Author (lower(Name))")
        connection.execute("CREATE UNIQUE INDEX some ON Book (Pages || '-' || BookId % 2) WHERE BookId <= 2")
    copy = tmp_path / "copy.sqlite"
    write_changed_copy(library, copy, read_file_schema(library))
    with open_read_only(copy) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_place_without_databases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no SQLite file in .*; expected names that end with \.sqlite"):
        find_databases(tmp_path)
    with pytest.raises(ConfigError, match="does not exist; expected a SQLite file"):
        find_databases(tmp_path / "nowhere")
    (tmp_path / "broken.sqlite").write_text("this is not a database, and it is long enough to be looked at")
    with pytest.raises(ConfigError, match="cannot be read: file is not a database"):
        read_file_schema(tmp_path / "broken.sqlite")
