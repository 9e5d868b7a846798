"""Deadlines of a fleet, and what happened in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimes:
    """Deadlines of a fleet, in seconds."""

    request_s: float = 120.0
    """Longest time of one request on one server, also if it has drawn a part of the reply by then."""
    request_option: str = "rollout.server_deadline_s"
    """The option that sets it, for errors."""
    wait_s: float = 60.0
    """How long to wait for a server when none can take a request, and for the first one at the start."""
    check_every_s: float = 2.0
    check_s: float = 10.0
    """Longest time of one health check."""
    load_s: float = 120.0
    """Longest time of loading one adapter on one server."""
    laggard_s: float = 15.0
    """How much longer than the first server the others may take to load a new version before they are fenced off."""

    @property
    def first_s(self) -> float:
        """Longest time of asking a server about itself, and of its first reply: it draws tokens for both, and its first
        ones may take long."""
        return max(self.check_s, self.request_s / 4)


@dataclass(slots=True, kw_only=True)
class FleetStats:
    """Counters of a fleet since its start."""

    num_requests: int = 0
    num_retries: int = 0
    """Requests that were sent again because a server failed them."""
    num_lost: int = 0
    """Times that a server was taken out."""
    num_returned: int = 0
    """Times that a server came back."""
    num_fenced: int = 0
    """Times that a version was published without a server, because it lagged behind."""
    num_sticky: int = 0
    """Requests that went on with a conversation, on the server that had drawn its last reply."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that servers did not have to read again."""

    def since(self, before: FleetStats) -> dict[str, float]:
        """Metrics of the time since an earlier copy of the counters was made."""
        num_requests = self.num_requests - before.num_requests
        num_prompt = self.num_prompt_tokens - before.num_prompt_tokens
        return {
            "fleet/requests": float(num_requests),
            "fleet/retries": float(self.num_retries - before.num_retries),
            "fleet/servers_lost": float(self.num_lost - before.num_lost),
            "fleet/servers_returned": float(self.num_returned - before.num_returned),
            "fleet/laggards_fenced": float(self.num_fenced - before.num_fenced),
            "fleet/sticky_share": (self.num_sticky - before.num_sticky) / max(1, num_requests),
            "fleet/cached_prompt_share": (self.num_cached_tokens - before.num_cached_tokens) / max(1, num_prompt),
        }
