"""Accounts that keep what was done to them."""
