import unittest

from gridwalk.grid import find, is_free, neighbours, parse, rotate
from gridwalk.paths import distances, regions, shortest


class GridTest(unittest.TestCase):
    def setUp(self):
        self.grid = parse("S.#\n..G")

    def test_free(self):
        self.assertTrue(is_free(self.grid, (0, 0)))
        self.assertFalse(is_free(self.grid, (0, 2)))
        self.assertFalse(is_free(self.grid, (-1, 0)))
        self.assertFalse(is_free(self.grid, (2, 0)))

    def test_neighbours(self):
        self.assertEqual(neighbours(self.grid, (0, 1)), [(1, 1), (0, 0)])

    def test_find(self):
        self.assertEqual(find(self.grid, "G"), (1, 2))
        self.assertIsNone(find(self.grid, "x"))

    def test_rotate(self):
        self.assertEqual(rotate(["ab", "cd"]), ["ca", "db"])

    def test_ragged_grids_are_refused(self):
        with self.assertRaises(ValueError):
            parse("ab\nc")


class PathsTest(unittest.TestCase):
    def test_distances(self):
        self.assertEqual(distances(parse("..\n#."), (0, 0)), {(0, 0): 0, (0, 1): 1, (1, 1): 2})

    def test_shortest(self):
        self.assertEqual(shortest(parse("S.#\n..G")), 3)

    def test_no_way(self):
        self.assertEqual(shortest(parse("S#G")), -1)

    def test_regions(self):
        self.assertEqual(regions(parse("..#.\n###.")), [2, 2])
