"""A model with bfloat16 matrices and float32 activations, as a CPU with dot products of bfloat16 runs it.

The matrices of products stay bfloat16: half the memory, and the products round their inputs (`ops/cpu_products.py`).
So do embeddings, of which one is often the output head as well; what is looked up there is widened. Everything else is
widened: norms, biases, and routers, whose choice of experts should not depend on rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.engine.model.expert_layers import ExpertLayer
from turnwise.engine.model.lora import LoraLinear


def hold_mixed(model: PreTrainedModel, linears: Mapping[str, LoraLinear], experts: Sequence[ExpertLayer]) -> None:
    """Convert every parameter to float32 in place, except for the matrices that the kernels read in bfloat16."""
    matrices = [linear.weight for linear in linears.values() if type(linear) is LoraLinear]
    matrices += [tensor for layer in experts for tensor in layer.own_tensors()]
    kept = {id(matrix) for matrix in matrices if _is_paired(matrix)}
    for embedding in (module for module in model.modules() if isinstance(module, nn.Embedding)):
        kept |= {id(parameter) for parameter in embedding.parameters(recurse=False)}
        embedding.register_forward_hook(lambda _module, _inputs, output: output.float())
    with torch.no_grad():
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point() and id(tensor) not in kept:
                    tensor.data = tensor.data.float()


def _is_paired(matrix: Tensor) -> bool:
    """Whether the kernels can read it: they take two numbers at a time."""
    return matrix.shape[-1] % 2 == 0 and (matrix.dim() == 2 or matrix.shape[-2] % 2 == 0)
