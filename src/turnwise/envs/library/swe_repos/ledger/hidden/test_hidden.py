import unittest

from ledger.accounts import Account, Refused, interest, transfer
from ledger.split import settle, split_evenly


class HiddenTest(unittest.TestCase):
    def test_limit(self):
        account = Account("a", limit=50)
        account.withdraw(50)
        self.assertEqual(account.balance, -50)
        with self.assertRaises(Refused):
            account.withdraw(1)

    def test_small_and_refused_amounts(self):
        account = Account("a")
        account.deposit(1)
        account.withdraw(1)
        for amount in (0, -1):
            with self.assertRaises(Refused):
                account.deposit(amount)
            with self.assertRaises(Refused):
                account.withdraw(amount)
        self.assertEqual(account.balance, 0)

    def test_a_refused_transfer_changes_nothing(self):
        poor, rich = Account("p"), Account("r")
        rich.deposit(5)
        with self.assertRaises(Refused):
            transfer(poor, rich, 3)
        self.assertEqual((poor.balance, rich.balance), (0, 5))

    def test_statement(self):
        account = Account("a", limit=10)
        account.deposit(5, "x")
        account.withdraw(15)
        account.deposit(2)
        self.assertEqual(account.statement(), ["+5 5 x", "-15 -10", "+2 -8"])

    def test_interest(self):
        self.assertEqual(interest(999, 5, 0), 999)
        self.assertEqual(interest(999, 5, 3), 1155)

    def test_split(self):
        for amount in range(20):
            for people in (1, 2, 3, 7):
                shares = split_evenly(amount, people)
                self.assertEqual((sum(shares), len(shares)), (amount, people))
                self.assertLessEqual(max(shares) - min(shares), 1)
                self.assertEqual(shares, sorted(shares, reverse=True))

    def test_settle(self):
        self.assertEqual(settle({"a": 10, "b": 10}), [])
        self.assertEqual(settle({"a": 90, "b": 0, "c": 30}), [("b", "a", 40), ("c", "a", 10)])
