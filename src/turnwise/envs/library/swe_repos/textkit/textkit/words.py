"""Words: slugs, wrapping, counting."""


def slug(text, separator="-"):
    """Lower case, letters and digits kept, everything else one separator."""
    parts = []
    word = ""
    for char in text.lower():
        if char.isalnum():
            word += char
        elif word:
            parts.append(word)
            word = ""
    if word:
        parts.append(word)
    return separator.join(parts)


def wrap(text, width):
    """Lines of whole words, none longer than width unless a single word is."""
    lines = []
    line = ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def count_words(text):
    """How often each word occurs, whatever its case."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(text, limit=1):
    """The words that occur most, in order of count and then of the alphabet."""
    counts = count_words(text)
    return sorted(counts, key=lambda word: (-counts[word], word))[:limit]
