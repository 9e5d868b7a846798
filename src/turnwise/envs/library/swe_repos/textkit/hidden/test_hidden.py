import unittest

from textkit.codes import expand, shift, squeeze
from textkit.words import count_words, most_common, slug, wrap


class HiddenTest(unittest.TestCase):
    def test_slug(self):
        self.assertEqual(slug("  a  --  b1 c "), "a-b1-c")
        self.assertEqual(slug(""), "")
        self.assertEqual(slug("end!"), "end")

    def test_wrap(self):
        self.assertEqual(wrap("aa bb cc dd", 5), ["aa bb", "cc dd"])
        self.assertEqual(wrap("aaaa b", 3), ["aaaa", "b"])
        self.assertEqual(wrap("a b", 2), ["a", "b"])

    def test_counts(self):
        self.assertEqual(count_words("X x x"), {"x": 3})
        self.assertEqual(most_common("z y z y x"), ["y"])
        self.assertEqual(most_common("c c c b b a", 2), ["c", "b"])

    def test_shift(self):
        text = "The quick brown fox, 1234."
        self.assertEqual(shift(shift(text, 7), -7), text)
        self.assertEqual(shift("aZ", -1), "zY")
        self.assertEqual(shift("Mm", 13), "Zz")

    def test_round_trip(self):
        for text in ("", "a", "abc", "zzzzzzzzzzzz", "aabbccaa"):
            self.assertEqual(expand(squeeze(text)), text)
