"""Cells and their neighbours; a cell is (row, column)."""


def parse(text):
    """The lines of a grid; all must have the same length."""
    lines = text.strip().split("\n")
    if any(len(line) != len(lines[0]) for line in lines):
        raise ValueError("lines of different length")
    return lines


def is_free(grid, cell):
    row, column = cell
    if row < 0 or column < 0:
        return False
    if row >= len(grid) or column >= len(grid[0]):
        return False
    return grid[row][column] != "#"


def neighbours(grid, cell):
    """Free cells above, below, to the left and to the right."""
    row, column = cell
    near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [place for place in near if is_free(grid, place)]


def find(grid, mark):
    """Where a mark first stands, or None."""
    for row, line in enumerate(grid):
        if mark in line:
            return (row, line.index(mark))
    return None


def rotate(grid):
    """The grid turned right by a quarter."""
    height, width = len(grid), len(grid[0])
    return ["".join(grid[height - 1 - row][column] for row in range(height)) for column in range(width)]
