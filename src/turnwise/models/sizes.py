"""The sizes of a model that its memory depends on, whoever reads them: the engine, or a plan made without one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Of a decoder-only language model."""

    num_layers: int
    hidden_size: int
    inner_size: int
    """Of the MLP."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size
