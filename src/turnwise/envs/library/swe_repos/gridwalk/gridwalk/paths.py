"""Shortest ways through a grid."""

from gridwalk.grid import find, is_free, neighbours


def distances(grid, start):
    """Steps from start to every cell that can be reached."""
    known = {start: 0}
    edge = [start]
    while edge:
        following = []
        for cell in edge:
            for near in neighbours(grid, cell):
                if near not in known:
                    known[near] = known[cell] + 1
                    following.append(near)
        edge = following
    return known


def shortest(grid, start="S", goal="G"):
    """Steps between two marks; -1 when there is no way."""
    begin, end = find(grid, start), find(grid, goal)
    return distances(grid, begin).get(end, -1)


def regions(grid):
    """Sizes of the free areas, largest first."""
    seen = set()
    sizes = []
    for row in range(len(grid)):
        for column in range(len(grid[0])):
            cell = (row, column)
            if is_free(grid, cell) and cell not in seen:
                area = distances(grid, cell)
                seen.update(area)
                sizes.append(len(area))
    return sorted(sizes, reverse=True)
