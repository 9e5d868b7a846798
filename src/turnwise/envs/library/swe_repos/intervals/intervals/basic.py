"""Questions about one or two intervals."""


def length(interval):
    start, end = interval
    return max(0, end - start)


def contains(interval, point):
    start, end = interval
    return start <= point < end


def overlap(a, b):
    """The part that both share, or None."""
    start = max(a[0], b[0])
    end = min(a[1], b[1])
    return (start, end) if start < end else None


def touches(a, b):
    """Whether they overlap or lie end to end."""
    return a[0] <= b[1] and b[0] <= a[1]
