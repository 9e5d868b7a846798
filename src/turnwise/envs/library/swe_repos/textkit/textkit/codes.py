"""Codes: shifting letters, and writing runs as counts."""


def shift(text, amount):
    """Move each letter along the alphabet, round its end; other characters stay."""
    out = ""
    for char in text:
        if "a" <= char <= "z":
            out += chr((ord(char) - 97 + amount) % 26 + 97)
        elif "A" <= char <= "Z":
            out += chr((ord(char) - 65 + amount) % 26 + 65)
        else:
            out += char
    return out


def squeeze(text):
    """Runs as a letter and its count: aaab becomes a3b1."""
    out = ""
    start = 0
    while start < len(text):
        end = start
        while end < len(text) and text[end] == text[start]:
            end += 1
        out += text[start] + str(end - start)
        start = end
    return out


def expand(code):
    """Undo squeeze."""
    out = ""
    place = 0
    while place < len(code):
        char = code[place]
        place += 1
        digits = ""
        while place < len(code) and code[place].isdigit():
            digits += code[place]
            place += 1
        out += char * int(digits)
    return out
