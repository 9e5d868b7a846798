"""Questions about lists of intervals."""

from intervals.basic import length, overlap, touches


def merge(intervals):
    """The same points in as few intervals as possible, in order."""
    merged = []
    for interval in sorted(intervals):
        if length(interval) == 0:
            continue
        if merged and touches(merged[-1], interval):
            last = merged.pop()
            interval = (last[0], max(last[1], interval[1]))
        merged.append(interval)
    return merged


def total(intervals):
    """How many points are covered, each counted once."""
    return sum(length(interval) for interval in merge(intervals))


def gaps(intervals, within):
    """What is not covered inside of `within`."""
    free = []
    place = within[0]
    for start, end in merge(intervals):
        if start >= within[1]:
            break
        if start > place:
            free.append((place, start))
        place = max(place, end)
    if place < within[1]:
        free.append((place, within[1]))
    return free


def busiest(intervals):
    """The largest number of intervals that share a point."""
    best = 0
    for start, _ in intervals:
        count = sum(1 for a, b in intervals if a <= start < b)
        best = max(best, count)
    return best


def conflicts(intervals):
    """Pairs of positions whose intervals overlap."""
    found = []
    for i in range(len(intervals)):
        for j in range(i + 1, len(intervals)):
            if overlap(intervals[i], intervals[j]):
                found.append((i, j))
    return found
