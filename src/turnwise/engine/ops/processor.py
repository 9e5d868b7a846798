"""What this machine can do for products of bfloat16 on its processor. Imports without torch, so that a plan can say it.

Weights in bfloat16 pay where one instruction multiplies and adds two of them: half the memory, half of what a decode
step reads, twice the products. Elsewhere they would be widened again for every product, so an engine uses float32.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from pathlib import Path

DOT_FLAG = "avx512_bf16"
"""The instructions that our kernels use, as /proc/cpuinfo names them."""


def lacking_for_bfloat16(root: Path = Path("/")) -> str:
    """Why products of bfloat16 would not be fast on this CPU; empty if they are. `root` is where /proc is."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"no {DOT_FLAG} is known of this {platform.machine()} processor"
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    if DOT_FLAG not in flags:
        return f"the processor has no {DOT_FLAG}"
    return "" if find_compiler() is not None else "there is no C compiler ($CC, cc, gcc, clang) to build the kernels"


def find_compiler() -> list[str] | None:
    """The C compiler as a command; `$CC` may carry flags ("ccache gcc") and, when set, is the only candidate."""
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for candidate in candidates:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None
