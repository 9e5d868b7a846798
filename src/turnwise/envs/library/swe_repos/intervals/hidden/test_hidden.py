import unittest

from intervals.basic import contains, length, overlap, touches
from intervals.many import busiest, conflicts, gaps, merge, total


class HiddenTest(unittest.TestCase):
    def test_length(self):
        self.assertEqual([length(i) for i in ((0, 1), (3, 3), (4, 2), (-5, 5))], [1, 0, 0, 10])

    def test_contains(self):
        self.assertEqual([contains((-1, 2), p) for p in (-2, -1, 0, 1, 2)], [False, True, True, True, False])

    def test_overlap(self):
        self.assertEqual(overlap((0, 10), (2, 3)), (2, 3))
        self.assertEqual(overlap((2, 3), (0, 10)), (2, 3))
        self.assertIsNone(overlap((5, 6), (1, 2)))

    def test_touches(self):
        self.assertTrue(touches((3, 4), (1, 3)))
        self.assertFalse(touches((4, 5), (1, 3)))

    def test_merge(self):
        self.assertEqual(merge([(1, 10), (2, 3), (3, 3), (10, 12), (14, 15)]), [(1, 12), (14, 15)])
        self.assertEqual(merge([]), [])

    def test_total_counts_points(self):
        pieces = [(0, 3), (2, 5), (7, 9), (8, 8)]
        self.assertEqual(total(pieces), len({p for a, b in pieces for p in range(a, b)}))

    def test_gaps(self):
        self.assertEqual(gaps([], (1, 3)), [(1, 3)])
        self.assertEqual(gaps([(0, 5)], (1, 3)), [])
        self.assertEqual(gaps([(-2, 1), (2, 3), (8, 9)], (0, 6)), [(1, 2), (3, 6)])
        self.assertEqual(gaps([(0, 1), (5, 9)], (0, 5)), [(1, 5)])

    def test_busiest_and_conflicts(self):
        self.assertEqual(busiest([]), 0)
        self.assertEqual(busiest([(0, 9), (1, 5), (4, 6), (5, 6)]), 3)
        self.assertEqual(conflicts([(0, 9), (1, 2), (8, 12), (12, 13)]), [(0, 1), (0, 2)])
