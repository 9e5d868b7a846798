import unittest

from gridwalk.grid import find, is_free, neighbours, parse, rotate
from gridwalk.paths import distances, regions, shortest


class HiddenTest(unittest.TestCase):
    def test_borders(self):
        grid = parse("...\n...")
        free = [(r, c) for r in range(-1, 4) for c in range(-1, 5) if is_free(grid, (r, c))]
        self.assertEqual(free, [(r, c) for r in range(2) for c in range(3)])

    def test_neighbours(self):
        grid = parse("...\n...\n...")
        self.assertEqual(neighbours(grid, (1, 1)), [(0, 1), (2, 1), (1, 0), (1, 2)])
        self.assertEqual(neighbours(grid, (0, 0)), [(1, 0), (0, 1)])
        self.assertEqual(neighbours(grid, (2, 2)), [(1, 2), (2, 1)])

    def test_find_takes_the_first(self):
        self.assertEqual(find(parse("..a\na.."), "a"), (0, 2))

    def test_rotate(self):
        self.assertEqual(rotate(["abc"]), ["a", "b", "c"])
        grid = ["abc", "def"]
        self.assertEqual(rotate(rotate(rotate(rotate(grid)))), grid)
        self.assertEqual(rotate(grid), ["da", "eb", "fc"])

    def test_parse(self):
        self.assertEqual(parse("\nab\ncd\n"), ["ab", "cd"])
        with self.assertRaises(ValueError):
            parse("a\nbc\nd")

    def test_detour(self):
        self.assertEqual(shortest(parse("S#.\n.#G\n...")), 5)
        self.assertEqual(shortest(parse("A..B"), "A", "B"), 3)
        self.assertEqual(distances(parse("....."), (0, 2)), {(0, 2): 0, (0, 1): 1, (0, 3): 1, (0, 0): 2, (0, 4): 2})

    def test_regions(self):
        self.assertEqual(regions(parse("##\n##")), [])
        self.assertEqual(regions(parse(".#..\n.###\n.#.#")), [3, 2, 1])
