"""Sharing an amount so that no cent is lost."""


def split_evenly(amount, people):
    """Shares that differ by at most a cent, larger ones first."""
    share = amount // people
    rest = amount % people
    return [share + 1 if place < rest else share for place in range(people)]


def settle(paid):
    """Payments (from, to, amount) that make everyone equal; paid maps names to cents."""
    shares = split_evenly(sum(paid.values()), len(paid))
    owed = {name: paid[name] - share for name, share in zip(sorted(paid), shares)}
    payments = []
    while any(owed.values()):
        debtor = min(sorted(owed), key=lambda name: owed[name])
        creditor = max(sorted(owed), key=lambda name: owed[name])
        amount = min(-owed[debtor], owed[creditor])
        owed[debtor] += amount
        owed[creditor] -= amount
        payments.append((debtor, creditor, amount))
    return payments
