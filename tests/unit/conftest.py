"""Examples of a property test have no deadline: a busy machine is no counterexample."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("turnwise", deadline=None)
settings.load_profile("turnwise")
