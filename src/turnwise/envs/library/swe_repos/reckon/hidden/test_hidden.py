import unittest

from reckon.evaluate import evaluate
from reckon.tokens import tokenize


class HiddenTest(unittest.TestCase):
    def test_tokens(self):
        self.assertEqual(tokenize(""), [])
        self.assertEqual(tokenize("10/2-305"), [10, "/", 2, "-", 305])
        self.assertEqual(tokenize(" 7 "), [7])
        with self.assertRaises(ValueError):
            tokenize("1_000")

    def test_left_to_right(self):
        self.assertEqual(evaluate("10 - 3 - 2"), 5)
        self.assertEqual(evaluate("100 / 5 / 2"), 10)
        self.assertEqual(evaluate("2 * 3 * 4 - 1"), 23)
        self.assertEqual(evaluate("8 / 4 * 2"), 4)

    def test_signs(self):
        self.assertEqual(evaluate("--4"), 4)
        self.assertEqual(evaluate("2 * -3"), -6)
        self.assertEqual(evaluate("-(2 + 3)"), -5)

    def test_brackets(self):
        self.assertEqual(evaluate("((2))"), 2)
        self.assertEqual(evaluate("(1 + 2) * (3 - 5)"), -6)

    def test_errors(self):
        for text in (")", "(", "()", "2 *", "* 2", "(1 + 2", "1 + 2)", "4 4"):
            with self.assertRaises(ValueError):
                evaluate(text)
