"""The losses: what each is called, what it can be told, and what it reads (`table.py`); no torch."""
