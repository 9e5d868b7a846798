"""The harness that plays a seat of a verifiers env for the policy: one chat call per turn, inside this process.

verifiers finds harnesses by the name of a top-level module; `HARNESS_ID` is the name under which this one is known.
"""

from __future__ import annotations

import sys
from typing import Any

from turnwise.envs.adapters.peers import import_peer

HARNESS_ID = "turnwise_policy"

_vf: Any = import_peer("verifiers.v1", extra="verifiers")
_aiohttp: Any = import_peer("aiohttp", extra="verifiers")


class PolicyHarnessConfig(_vf.HarnessConfig):
    """This harness has no options."""


class PolicyHarness(_vf.Harness[PolicyHarnessConfig]):
    """Sends the conversation to the model's address and returns. The env continues from there."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002 - part of the interface, as the next ones
        runtime: Any,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002 - this harness says that it takes no tools
        data: Any,
    ) -> Any:
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(mode="json", exclude_none=True) for message in prompt or ()]
        no_limit = _aiohttp.ClientTimeout(total=None)  # no timeout here, because the rollout has deadlines
        async with (
            _aiohttp.ClientSession(timeout=no_limit) as session,
            session.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            ) as response,
        ):
            text = await response.text()
            return _vf.ProgramResult(0 if response.status == 200 else 1, "", "" if response.status == 200 else text)


__all__ = ["PolicyHarness"]

sys.modules.setdefault(HARNESS_ID, sys.modules[__name__])
