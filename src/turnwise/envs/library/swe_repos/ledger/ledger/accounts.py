"""Accounts: amounts in whole cents, no account below its limit."""


class Refused(Exception):
    """An entry that would break a rule."""


class Account:
    def __init__(self, name, limit=0):
        self.name = name
        self.limit = limit
        self.entries = []

    @property
    def balance(self):
        return sum(amount for amount, _ in self.entries)

    def deposit(self, amount, note=""):
        if amount <= 0:
            raise Refused("nothing to deposit")
        self.entries.append((amount, note))

    def withdraw(self, amount, note=""):
        if amount <= 0:
            raise Refused("nothing to withdraw")
        if self.balance - amount < -self.limit:
            raise Refused("not enough in " + self.name)
        self.entries.append((-amount, note))

    def statement(self):
        """Lines of amount and running balance."""
        lines = []
        running = 0
        for amount, note in self.entries:
            running += amount
            lines.append(f"{amount:+d} {running} {note}".rstrip())
        return lines


def transfer(source, target, amount):
    """Move money; both accounts change or neither does."""
    source.withdraw(amount, "to " + target.name)
    target.deposit(amount, "from " + source.name)


def interest(balance, percent, years):
    """What a balance grows to, yearly, rounded down to whole cents each year."""
    for _ in range(years):
        balance += balance * percent // 100
    return balance
