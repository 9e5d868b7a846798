"""Tokens to a number: * and / before + and -, brackets first, division rounds down."""

from reckon.tokens import tokenize


def evaluate(text):
    tokens = tokenize(text)
    value, place = _sum(tokens, 0)
    if place != len(tokens):
        raise ValueError("something is left over")
    return value


def _sum(tokens, place):
    value, place = _product(tokens, place)
    while place < len(tokens) and tokens[place] in ("+", "-"):
        sign = tokens[place]
        right, place = _product(tokens, place + 1)
        value = value + right if sign == "+" else value - right
    return value, place


def _product(tokens, place):
    value, place = _factor(tokens, place)
    while place < len(tokens) and tokens[place] in ("*", "/"):
        sign = tokens[place]
        right, place = _factor(tokens, place + 1)
        if sign == "*":
            value = value * right
        else:
            value = value // right
    return value, place


def _factor(tokens, place):
    if place >= len(tokens):
        raise ValueError("a number is missing")
    token = tokens[place]
    if token == "-":
        value, place = _factor(tokens, place + 1)
        return -value, place
    if token == "(":
        value, place = _sum(tokens, place + 1)
        if place >= len(tokens) or tokens[place] != ")":
            raise ValueError("a bracket is missing")
        return value, place + 1
    if not isinstance(token, int):
        raise ValueError("a number is missing")
    return token, place + 1
