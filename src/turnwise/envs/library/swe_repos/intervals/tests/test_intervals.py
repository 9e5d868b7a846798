import unittest

from intervals.basic import contains, length, overlap, touches
from intervals.many import busiest, conflicts, gaps, merge, total


class BasicTest(unittest.TestCase):
    def test_length(self):
        self.assertEqual(length((2, 7)), 5)

    def test_the_start_is_in_and_the_end_is_not(self):
        self.assertTrue(contains((2, 5), 2))
        self.assertFalse(contains((2, 5), 5))

    def test_overlap(self):
        self.assertEqual(overlap((1, 5), (3, 9)), (3, 5))
        self.assertIsNone(overlap((1, 3), (3, 9)))

    def test_end_to_end_touches(self):
        self.assertTrue(touches((1, 3), (3, 4)))
        self.assertFalse(touches((1, 3), (4, 5)))


class ManyTest(unittest.TestCase):
    def test_merge(self):
        self.assertEqual(merge([(5, 7), (1, 3), (2, 4)]), [(1, 4), (5, 7)])

    def test_total(self):
        self.assertEqual(total([(1, 4), (2, 6)]), 5)

    def test_gaps(self):
        self.assertEqual(gaps([(2, 4)], (0, 6)), [(0, 2), (4, 6)])

    def test_busiest(self):
        self.assertEqual(busiest([(1, 5), (2, 3), (4, 6)]), 2)

    def test_conflicts(self):
        self.assertEqual(conflicts([(1, 3), (2, 4), (4, 5)]), [(0, 1)])
