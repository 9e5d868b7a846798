"""HTML in a few functions. Everything that is shown goes through `text`, so no content can break a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:0;color:#1c2430;background:#f5f6f8}
header{background:#20435c;color:#fff;padding:10px 24px;display:flex;gap:18px;align-items:center;flex-wrap:wrap}
header a{color:#fff}header b{font-size:18px}main{max-width:860px;margin:18px auto;padding:18px 24px;background:#fff;
border:1px solid #dfe3e8;border-radius:8px}h1{font-size:22px;margin:0 0 12px}h2{font-size:17px;margin:18px 0 6px}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #e4e8ec;padding:6px 8px;text-align:left}
form{margin:8px 0}label{display:block;margin:8px 0}td form,td label,header form,header label{display:inline;margin:0}
input,select,textarea{font:inherit;padding:4px 6px;border:1px solid #b8c1ca;border-radius:4px}
button{font:inherit;padding:5px 12px;border:1px solid #20435c;background:#2d6187;color:#fff;border-radius:4px}
.note{background:#fff6da;border:1px solid #ecd98a;padding:6px 10px;border-radius:4px}"""


def text(value: object) -> str:
    return escape(str(value))


def link(label: str, href: str) -> str:
    return f'<a href="{text(href)}">{text(label)}</a>'


def links(targets: Mapping[str, str]) -> str:
    return " ".join(link(label, href) for label, href in targets.items())


def heading(label: str, level: int = 2) -> str:
    return f"<h{level}>{text(label)}</h{level}>"


def paragraph(value: object) -> str:
    return f"<p>{text(value)}</p>"


def field(label: str, name: str, value: object = "", kind: str = "text") -> str:
    """An input with its label."""
    return f'<label>{text(label)} <input type="{kind}" name="{text(name)}" value="{text(value)}"></label>'


def area(label: str, name: str, value: object = "") -> str:
    return f'<label>{text(label)} <textarea name="{text(name)}" rows="4" cols="60">{text(value)}</textarea></label>'


def choice(label: str, name: str, options: Iterable[str], chosen: str = "") -> str:
    """A list to choose one option from."""
    marked = (f"<option{' selected' if one == chosen else ''}>{text(one)}</option>" for one in options)
    return f'<label>{text(label)} <select name="{text(name)}">{"".join(marked)}</select></label>'


def tick(label: str, name: str, *, is_on: bool = False) -> str:
    """A box to tick."""
    mark = " checked" if is_on else ""
    return f'<label><input type="checkbox" name="{text(name)}" value="on"{mark}> {text(label)}</label>'


def form(action: str, submit: str, *fields: str, method: str = "post") -> str:
    """Fields and a button that sends them."""
    inside = "".join(fields)
    return f'<form method="{method}" action="{text(action)}">{inside} <button>{text(submit)}</button></form>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. The cells are HTML already."""
    titles = "".join(f"<th>{text(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{body}</table>"


def whole_page(site: str, title: str, navigation: str, parts: Sequence[str], note: str = "") -> bytes:
    """A page with the site's header."""
    told = f'<p class="note" role="status">{text(note)}</p>' if note else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><header><b>{text(site)}</b>{navigation}'
        f"</header><main>{heading(title, 1)}{told}{''.join(parts)}</main></body></html>"
    ).encode()
