"""llama.cpp itself for tests: the wheel `xllamacpp` holds it as a library, in an environment of its own (130 MB).

`next_token_logprobs` runs this very file there. llama.cpp is told to keep its KV cache in float32 and to use no flash
attention, so that what is compared is the file and not a rounded cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "2026.10.11549"
RUN_S = 300.0


def next_token_logprobs(model: Path, prompts: Sequence[list[int] | str]) -> list[list[float]]:
    """For each prompt, ids or a text, the logprob of every token of the vocabulary as the next one."""
    from service_process import sdk_python  # not in llama.cpp's environment

    done = subprocess.run(
        [str(sdk_python("xllamacpp", VERSION)), __file__, str(model)],
        input=json.dumps(list(prompts)),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _answer(model: str, prompts: list[Any]) -> list[list[float]]:
    import xllamacpp  # pyright: ignore[reportMissingImports] - it is in the other environment

    library: Any = xllamacpp
    settings = library.CommonParams()
    settings.model.path = model
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 256, 1, False, 0
    settings.cache_type_k = settings.cache_type_v = library.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = 1
    server = library.Server(settings)
    found: list[list[float]] = []
    for prompt in prompts:
        # A drawn token that is no whole character would come without logprobs. The bias does not enter the logprobs.
        drawn = {"n_predict": 1, "logit_bias": [["a", 1000.0]], "cache_prompt": False}
        (choice,) = server.handle_completions({"prompt": prompt, "n_probs": 10**6, **drawn})["choices"]
        (place,) = choice["logprobs"]["content"]
        by_id = {one["id"]: one["logprob"] for one in place["top_logprobs"]}
        found.append([by_id[number] for number in range(len(by_id))])
    return found


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1], json.load(sys.stdin))))
