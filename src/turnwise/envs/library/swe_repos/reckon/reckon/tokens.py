"""Text to tokens: numbers, signs and brackets."""

SIGNS = "+-*/()"


def tokenize(text):
    """Numbers as int, everything else as a one-letter string."""
    tokens = []
    place = 0
    while place < len(text):
        char = text[place]
        if char.isdigit():
            end = place
            while end < len(text) and text[end].isdigit():
                end += 1
            tokens.append(int(text[place:end]))
            place = end
        elif char in SIGNS:
            tokens.append(char)
            place += 1
        elif char == " ":
            place += 1
        else:
            raise ValueError("cannot read " + char)
    return tokens
