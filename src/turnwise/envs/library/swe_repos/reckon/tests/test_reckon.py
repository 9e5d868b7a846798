import unittest

from reckon.evaluate import evaluate
from reckon.tokens import tokenize


class ReckonTest(unittest.TestCase):
    def test_tokens(self):
        self.assertEqual(tokenize("12 + (3)"), [12, "+", "(", 3, ")"])

    def test_unknown_letters(self):
        with self.assertRaises(ValueError):
            tokenize("2 x 3")

    def test_plus_and_minus(self):
        self.assertEqual(evaluate("7 - 2 + 1"), 6)

    def test_products_come_first(self):
        self.assertEqual(evaluate("2 + 3 * 4"), 14)

    def test_division_rounds_down(self):
        self.assertEqual(evaluate("9 / 2"), 4)

    def test_brackets(self):
        self.assertEqual(evaluate("2 * (3 + 4)"), 14)

    def test_a_sign_before_a_number(self):
        self.assertEqual(evaluate("-3 + 5"), 2)

    def test_what_is_missing_or_left_over(self):
        for text in ("", "2 +", "(2", "2 3"):
            with self.assertRaises(ValueError):
                evaluate(text)
