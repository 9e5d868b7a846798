"""The section `model` of a run's config."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.runtime.section import Section

ADAPTER_OPTIONS = ("rank", "expert_rank", "train_attn", "train_mlp", "train_unembed", "train_router")
"""Options that only a LoRA adapter reads."""


EXPERT_OPTIONS = ("expert_rank", "train_router")
"""Options that only a mixture of experts reads, and only in this process."""


class ModelConfig(Section):
    """The base model, and what of it is trained."""

    name: str = Field(
        default="smollm2",
        min_length=1,
        description="The model: a directory, a .gguf file, or a name in the store or on the hub.",
    )
    alias: str = Field(default="", description="A model to use in place of `name`; the plan shows it. Empty: none.")
    base_url: str = Field(
        default="",
        description="Address of a service that trains and samples: `turnwise serve`, Tinker or MinT. Empty: "
        "this process trains and samples.",
    )
    train: Literal["lora", "full"] = Field(
        default="lora",
        description="What is trained: a LoRA adapter on the frozen model, or all weights of the model (docs/scale.md).",
    )
    start_from: str = Field(
        default="",
        description="Also written `model.from`: a run directory (its best checkpoint) or a checkpoint whose weights "
        "training starts with, also one of another world. Empty: the base model as it is.",
    )
    rank: int = Field(default=16, ge=1, description="Rank of the LoRA adapter.")
    expert_rank: int = Field(
        default=0,
        ge=0,
        description="Rank of each routed expert's adapter; 0: `rank` divided by the experts that a token uses.",
    )
    train_attn: bool = Field(default=True, description="Adapt the attention projections.")
    train_mlp: bool = Field(default=True, description="Adapt the MLP projections, those of routed experts too.")
    train_unembed: bool = Field(default=True, description="Adapt the output head.")
    train_router: bool = Field(
        default=False, description="Adapt the routers that choose experts; else they are frozen."
    )
    routing_replay: bool = Field(
        default=False,
        description="Train each token with the experts that the sampler chose for it (docs/experts.md).",
    )

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("train_attn, train_mlp and train_unembed are all false; nothing would be trained")
        return self

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        unread = [name for name in ADAPTER_OPTIONS if name in self.changed_options()]
        if self.train == "full" and unread:
            raise ValueError(
                f"{unread[0]} is for a LoRA adapter, and train=full trains all weights; leave one of them out"
            )
        return self

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, base_url: str) -> str:
        if base_url and not base_url.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r}; expected http://HOST:PORT or https://HOST")
        return base_url.rstrip("/")


def expert_options(model: ModelConfig) -> dict[str, Any]:
    """The options of experts that a run sets."""
    return {name: getattr(model, name) for name in EXPERT_OPTIONS if getattr(model, name)}
