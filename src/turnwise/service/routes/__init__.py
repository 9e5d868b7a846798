"""Routers, one per subject: parse, call, reply."""
