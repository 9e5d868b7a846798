import unittest

from ledger.accounts import Account, Refused, interest, transfer
from ledger.split import settle, split_evenly


class AccountTest(unittest.TestCase):
    def setUp(self):
        self.account = Account("ann")
        self.account.deposit(100, "pay")

    def test_balance(self):
        self.account.withdraw(30)
        self.assertEqual(self.account.balance, 70)

    def test_all_of_it_can_be_withdrawn(self):
        self.account.withdraw(100)
        self.assertEqual(self.account.balance, 0)

    def test_not_more_than_there_is(self):
        with self.assertRaises(Refused):
            self.account.withdraw(101)

    def test_nothing_is_refused(self):
        with self.assertRaises(Refused):
            self.account.deposit(0)

    def test_statement(self):
        self.account.withdraw(30, "rent")
        self.assertEqual(self.account.statement(), ["+100 100 pay", "-30 70 rent"])

    def test_transfer(self):
        other = Account("bob")
        transfer(self.account, other, 40)
        self.assertEqual((self.account.balance, other.balance), (60, 40))

    def test_interest(self):
        self.assertEqual(interest(1000, 10, 2), 1210)


class SplitTest(unittest.TestCase):
    def test_split(self):
        self.assertEqual(split_evenly(10, 3), [4, 3, 3])

    def test_settle(self):
        self.assertEqual(settle({"a": 30, "b": 0}), [("b", "a", 15)])
