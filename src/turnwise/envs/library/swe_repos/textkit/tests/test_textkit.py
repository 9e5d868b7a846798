import unittest

from textkit.codes import expand, shift, squeeze
from textkit.words import count_words, most_common, slug, wrap


class WordsTest(unittest.TestCase):
    def test_slug_of_a_title(self):
        self.assertEqual(slug("Hello, World 2!"), "hello-world-2")

    def test_slug_with_another_separator(self):
        self.assertEqual(slug("a b", "_"), "a_b")

    def test_wrap_breaks_between_words(self):
        self.assertEqual(wrap("one two three", 7), ["one two", "three"])

    def test_wrap_of_nothing(self):
        self.assertEqual(wrap("", 5), [])

    def test_counts(self):
        self.assertEqual(count_words("a b A"), {"a": 2, "b": 1})

    def test_most_common(self):
        self.assertEqual(most_common("b a b c a", 2), ["a", "b"])


class CodesTest(unittest.TestCase):
    def test_shift_goes_round(self):
        self.assertEqual(shift("xyz", 3), "abc")

    def test_shift_of_capitals(self):
        self.assertEqual(shift("Az!", 1), "Ba!")

    def test_squeeze(self):
        self.assertEqual(squeeze("aaab"), "a3b1")

    def test_expand(self):
        self.assertEqual(expand("a3b12"), "aaa" + "b" * 12)
