"""Whole weights that a vLLM reads in the trainer's memory, by CUDA IPC: what its routes expect.

vLLM's side is `vllm/distributed/weight_transfer/ipc_engine.py`, in its packed form: every part names its tensors and
has the handle of the one buffer in which they lie side by side. vLLM copies a part before it answers, so the buffer can
be filled again then. A handle is a tuple of Python objects, which HTTP carries pickled; a vLLM reads it only with
VLLM_ALLOW_INSECURE_SERIALIZATION=1.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from turnwise.backends.servers.http import ServerGoneError, ServerRefusedError
from turnwise.backends.servers.vllm_calls import ASK_S, VllmCalls
from turnwise.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from turnwise.engine.shared_weights import SharedChunk

SETTINGS = {"packed": True}
"""vLLM's `IPCWeightTransferInitInfo`."""
ARGUMENT, BACKEND = "--weight-transfer-config", json.dumps({"backend": "ipc"})
VARIABLE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


async def init_ipc(calls: VllmCalls) -> None:
    """Tell a vLLM that weights will come by IPC; refuse one that was not started for it.

    A vLLM that was started without it answers with status 500, as one does whose engine has died. The first one is
    healthy.
    """
    try:
        await calls.init_transfer(SETTINGS)
    except (ServerGoneError, ServerRefusedError) as error:
        if isinstance(error, ServerGoneError) and not (error.status == 500 and await calls.is_healthy()):
            raise
        raise ConfigError(
            f"rollout.weight_transfer=ipc: the server at {calls.url} does not take weights that way ({error}); start "
            f"it with {VARIABLE}=1 and {ARGUMENT} '{BACKEND}', or use rollout.weight_transfer=disk"
        ) from error


async def send_by_ipc(calls: VllmCalls, chunks: AsyncIterator[SharedChunk]) -> None:
    """Bring whole weights to a vLLM whose requests are paused."""
    await calls.start_update()
    try:
        async for chunk in chunks:
            await calls.update(to_update_info(chunk))
    except BaseException:
        # Its weights are some of each, and nobody asks for them; but it takes the next update only after this.
        with contextlib.suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                await calls.finish_update()
        raise
    await calls.finish_update()


def to_update_info(chunk: SharedChunk) -> dict[str, Any]:
    """vLLM's `IPCWeightTransferUpdateInfo`, as JSON carries it."""
    return {
        "names": list(chunk.names),
        "dtype_names": list(chunk.dtypes),
        "shapes": [list(shape) for shape in chunk.shapes],
        "tensor_sizes": list(chunk.sizes),
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(dict(chunk.handles))).decode(),
    }
