"""Loads a Hugging Face causal language model; attention is replaced by ours, and every linear can carry adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from turnwise.engine.attention.plans import ATTENTION_NAME, AttentionPlan, GroupedPlan, PagedPlan
from turnwise.engine.model.body import FusedBody
from turnwise.engine.model.expert_layers import EXPERTS_NAME, ExpertLayer, wrap_experts, wrap_routers
from turnwise.engine.model.full import WeightLayout
from turnwise.engine.model.fused_parts import check_bitwise, check_split
from turnwise.engine.model.kept import PLAIN_STRETCH, KeptRoom, PassSizes
from turnwise.engine.model.logits import finish_logits
from turnwise.engine.model.lora import LinearGroup, LoraLinear, Route, RouteHolder
from turnwise.engine.model.mixed import hold_mixed
from turnwise.engine.model.pretrained import auto_class, load_pretrained
from turnwise.engine.model.recomputed_layers import RecomputedLayers
from turnwise.engine.model.reference import END_LENGTH, Reference, SequenceStart, language_model, run_plainly
from turnwise.engine.model.rotation import fix_rotation
from turnwise.engine.model.routing import RecordedRouting
from turnwise.engine.model.sharded import BASE_SOURCE, ShardedHead, ShardedWeights, ShardExchange, ShardLayout
from turnwise.engine.model.trace import find_layers
from turnwise.engine.ops.interface import Ops
from turnwise.engine.sampling.kvcache import KvShape
from turnwise.errors import ConfigError, ModelError
from turnwise.models.experts import ExpertSpec
from turnwise.models.facts import ModelSizes
from turnwise.models.families import (
    COMPOSITES,
    angle_switch,
    check_supported,
    context_length,
    describe_experts,
    has_fixed_angles,
    has_stretched_angles,
)
from turnwise.models.linears import Shape, can_be_adapted

RANDOM_FILE = "random_weights"
"""A directory with this file and a config.json stands for a model with random weights."""
_CAN_LEAVE_OUT = ("gemma4", "gemma4_unified")
"""Models that transformers builds without what reads images and sound, where their config has none of it."""
_OTHER_INPUTS = ("vision_tower", "multi_modal_projector")
"""What reads images, in models that transformers builds with it alone."""


class CausalModel:
    """The frozen base model: its body, its head, and the linears that can carry adapters."""

    def __init__(
        self,
        directory: Path,
        ops: Ops,
        dtype: torch.dtype,
        *,
        is_tested: bool = False,
        wanted_context: int = 0,
        exchange: ShardExchange | None = None,
    ) -> None:
        """Load the model.

        Args:
            ops: what computes it, and on which device.
            is_tested: transformers runs a few tokens before anything is replaced, for the self-test.
            wanted_context: tokens of the longest sequence (`engine.context_length`); 0: the model's own.
            exchange: keeps a part of the weights only; the others are gathered over it.
        """
        device = ops.device
        whole = _read_config(directory)
        config = whole.get_text_config()
        host = torch.device("cpu") if exchange is not None else device
        model = _load(directory, whole, dtype) if not is_random(directory) else _draw(whole, dtype, host)
        self.config, self.arch = config, type(model).__name__
        self.device, self.dtype, self.ops = device, dtype, ops
        self.holder = RouteHolder()
        nn.Module.to(model.requires_grad_(False).eval(), host)
        self.max_context_length = context_length(config.to_dict(), wanted_context)
        self.angle_switch = angle_switch(config.to_dict(), self.max_context_length)
        """Longer sequences have other angles (`rotation.py`); None: all sequences have the same."""
        self.references = self._run_plainly(model) if is_tested else ()
        """What the self-test compares with; empty once it has run."""
        if exchange is not None:
            _move_buffers(model, device)
        self._fix_angles(model)
        self.linears = _wrap_linears(model, self.holder)
        self.experts = _wrap_experts(model, self.holder, describe_experts(config.to_dict()), self.linears)
        if self.activation_dtype is not dtype:
            hold_mixed(model, self.linears, self.experts)
        self.shapes = _adaptable_shapes(self.linears, self.experts)
        """Every matrix that can carry an adapter, by its dotted name."""
        head = model.get_output_embeddings()
        if not isinstance(head, LoraLinear):
            raise ModelError(f"{self.arch} has no linear output layer")
        self.head = head
        self.body: nn.Module = language_model(model)
        self.vocab_size = int(self.head.out_features)
        self.sizes = ModelSizes.read(config.to_dict(), self.vocab_size, self.max_context_length)
        self._check_bitwise()
        self.fused = FusedBody(self.body, self.ops, self.sizes) if FusedBody.supports(self.sizes) else None
        self._recomputed = RecomputedLayers(find_layers(self.body, self.sizes.num_layers), self.holder, device)
        self._room = KeptRoom()
        self.layout = _read_layout(model, self.head, self.fused)
        """The range of each weight in the flat tensor of a policy whose every weight is trained."""
        self.num_base_bytes = sum(parameter.nbytes for parameter in self.layout.parameters.values())
        """Bytes of the frozen weights that this process holds."""
        self.shards = None if exchange is None else self._keep_part(exchange)
        """How the weights are cut, if this process holds only a part of them."""
        self.eos_ids = _eos_ids(model)
        self.kv_shape = _kv_shape(self.sizes)

    def _check_bitwise(self) -> None:
        if self.ops.is_bitwise:
            check_bitwise(self.sizes, self.ops.facts, has_switch=self.angle_switch is not None)

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of activations, keys and values, and adapters in use."""
        return torch.float32 if self.ops.facts.has_wide_activations else self.dtype

    def _fix_angles(self, model: PreTrainedModel) -> None:
        """Compute the angles of all positions once, if the family has angles that do not depend on the sequence."""
        if has_fixed_angles(self.config.to_dict()):
            lengths = [length for length in (self.angle_switch, self.max_context_length) if length is not None]
            fix_rotation(language_model(model), lengths, self.device)

    def _keep_part(self, exchange: ShardExchange) -> ShardLayout:
        """Let all weights go but this learner's part of each."""
        if self.fused is None or self.experts:
            what = "routes tokens to experts" if self.experts else "has blocks that the fused body does not run"
            raise ConfigError(
                f"cluster.shard=true with {self.arch}, which {what}: its weights cannot be shared out yet; leave it "
                "out, or use a model with dense blocks (docs/models.md)"
            )
        shards = ShardLayout(self.layout, exchange.place)
        local = torch.zeros(shards.size, dtype=self.dtype, device=self.device)
        shards.cut(self.layout.parameters, local)
        exchange.use(shards)
        exchange.add(BASE_SOURCE, local)
        weights = ShardedWeights(shards, exchange, BASE_SOURCE)
        for parameter in self.layout.parameters.values():
            parameter.data = parameter.data.new_empty(0)
        template = self.layout.forget_tensors()
        assert template is not None, "the fused body runs the model"
        self.fused.read_instead(weights.body, template.groups)
        self.head = self.linears[self.head.name] = ShardedHead(self.head, weights)
        self.num_base_bytes = local.nbytes
        return shards

    def _run_plainly(self, model: PreTrainedModel) -> Sequence[Reference]:
        """transformers' side of the self-test, with each set of angles that a sequence may have here."""
        context, config = self.max_context_length, self.config.to_dict()
        at_end = SequenceStart(context - END_LENGTH, context - END_LENGTH + (self.angle_switch or 0))
        if has_stretched_angles(config, context):
            return (run_plainly(model, at_end),)
        return (run_plainly(model), *([] if self.angle_switch is None else [run_plainly(model, at_end)]))

    @property
    def num_choices(self) -> tuple[int, int]:
        """Layers whose choice of experts can be recorded and replayed, and experts of a token."""
        self.sizes.check_replay(has_switch=self.angle_switch is not None)
        assert self.sizes.experts is not None, "checked above"
        return len(self.experts), self.sizes.experts.num_chosen

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The base's own values of everything in `shapes`."""
        matrices = {name: linear.weight.detach() for name, linear in self.linears.items()}
        return matrices | {name: matrix for layer in self.experts for name, matrix in layer.matrices().items()}

    @property
    def groups(self) -> Sequence[LinearGroup]:
        """Linears whose weights the fused body has joined into one tensor."""
        return self.fused.groups if self.fused is not None else ()

    def keep(self, room: KeptRoom) -> None:
        """Say how much a training pass may keep for its backward pass."""
        check_split(self.sizes, room.activations, is_sharded=self.shards is not None)
        self._room = room
        if self.fused is not None:
            self.fused.room = room

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, route: Route, rows: Tensor | None = None
    ) -> Tensor:
        """Last hidden states [N, H] of packed tokens [N], or those of `rows` (sorted) alone."""
        first = plan.plans[0] if isinstance(plan, GroupedPlan) else plan
        if isinstance(first, PagedPlan) and first.cache.choices is not None:
            route = replace(route, routing=RecordedRouting(first))
        if self.fused is not None:
            return self.fused.hidden(input_ids, position_ids, plan, self.computed(route), rows)
        self._recomputed.is_on = torch.is_grad_enabled() and not self._keeps_all(len(input_ids), route)
        inputs = {"input_ids": input_ids[None], "position_ids": position_ids[None]}
        settings = {"use_cache": False, "plan": plan, "return_dict": True}
        with self.routed(route):
            if route.full is None:
                out = self.body(**inputs, **settings)
            else:
                own = self.layout.of_body(route.full.leaves or route.full.weights.tensors)
                out = torch.func.functional_call(self.body, own, kwargs={**inputs, **settings})
        hidden = out.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def _keeps_all(self, num_tokens: int, route: Route) -> bool:
        """Whether there is memory for all that transformers' layers keep, which is more than what our layers keep."""
        rank = max((span.weights.lora.rank for span in route.spans if span.weights.pairs), default=0)
        one = PassSizes(self.sizes, self.activation_dtype.itemsize, rank, self.ops.facts)
        return self._room.choose(one, int(num_tokens * PLAIN_STRETCH), can_split=False).keeps_all

    def logits(self, hidden: Tensor, route: Route) -> Tensor:
        """Logits [rows, V] of hidden states [rows, H]."""
        return finish_logits(self.head.apply_route(hidden, self.computed(route)), self.sizes.logits)

    def computed(self, route: Route) -> Route:
        """The same route, computed as this model's engine computes."""
        return replace(route, ops=self.ops) if self.ops.is_bitwise else route

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        self.holder.route = route
        try:
            yield
        finally:
            self.holder.route = Route()


def _read_layout(model: PreTrainedModel, head: LoraLinear, fused: FusedBody | None) -> WeightLayout:
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    body = language_model(model)
    (name,) = (name for name, module in model.named_modules() if module is body)
    return WeightLayout(
        parameters,
        fused.groups if fused is not None else (),
        body=fused,
        body_prefix=f"{name}.",
        head=(names[id(head.weight)], None if head.bias is None else names[id(head.bias)]),
    )


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring what is no weight to the device; weights stay where they are until they are cut."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _read_config(directory: Path) -> PretrainedConfig:
    """What transformers reads; of a model that reads more than text, the parts that do are left out."""
    try:
        config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as cause:
        raise ModelError(f"{directory} holds no model that transformers can read: {cause}") from cause
    check_supported(config.to_dict())
    if config.model_type in _CAN_LEAVE_OUT:
        config.vision_config = config.audio_config = None
    return config


def _forget_other_inputs(model: PreTrainedModel) -> PreTrainedModel:
    """Let go what reads images."""
    if model.config.model_type in COMPOSITES:
        for name in _OTHER_INPUTS:
            if getattr(model.base_model, name, None) is not None:
                delattr(model.base_model, name)
    return model


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars in the block."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def without_remarks() -> Iterator[None]:
    """Keep transformers from logging anything but errors in the block."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def is_random(directory: Path) -> bool:
    """Whether the directory has no weights, and says that they are drawn at random when the model is loaded."""
    return (directory / RANDOM_FILE).exists()


def _draw(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with random weights, made where it will run: for measurements of speed, without a large file."""
    torch.manual_seed(0)
    with device:
        return _forget_other_inputs(auto_class(config).from_config(config, dtype=dtype, **_implementations(config)))


def _implementations(config: PretrainedConfig) -> dict[str, str]:
    """Our names for what transformers lets us replace."""
    has_experts = describe_experts(config.get_text_config().to_dict()) is not None
    return {"attn_implementation": ATTENTION_NAME} | ({"experts_implementation": EXPERTS_NAME} if has_experts else {})


def _load(directory: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    is_in_part = config.model_type in COMPOSITES  # transformers would list what is left out
    try:
        with without_progress_bars(), without_remarks() if is_in_part else nullcontext():
            model = load_pretrained(directory, dtype, config, **_implementations(config))
    except (OSError, ValueError) as cause:
        raise ModelError(f"cannot load {config.model_type} from {directory}: {cause}") from cause
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{type(model).__name__} does not let its attention be replaced, so it is not supported")
    return _forget_other_inputs(model)


def _wrap_linears(model: PreTrainedModel, holder: RouteHolder) -> dict[str, LoraLinear]:
    """Replace linears by ones that can carry adapters, in place; keys are dotted names, as PEFT writes them."""
    linears: dict[str, LoraLinear] = {}
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        is_adaptable = module is head or can_be_adapted(name)
        if type(module) is nn.Linear and is_adaptable:  # a subclass may compute something else, as PhiMoE's router does
            parent, _, child = name.rpartition(".")
            wrapped = LoraLinear(module, name, holder)
            setattr(model.get_submodule(parent), child, wrapped)
            linears[name] = wrapped
    return linears


def _wrap_experts(
    model: PreTrainedModel, holder: RouteHolder, spec: ExpertSpec | None, linears: dict[str, LoraLinear]
) -> Sequence[ExpertLayer]:
    """The routed experts of every layer; routers that can carry adapters join the linears."""
    if spec is None:
        return ()
    experts = wrap_experts(model, holder, spec)
    linears.update(wrap_routers(model, holder, spec))
    return experts


def _adaptable_shapes(linears: Mapping[str, LoraLinear], experts: Sequence[ExpertLayer]) -> dict[str, Shape]:
    shapes = {name: Shape(linear.out_features, linear.in_features) for name, linear in linears.items()}
    return shapes | {name: shape for layer in experts for name, shape in layer.shapes().items()}


def _kv_shape(sizes: ModelSizes) -> KvShape:
    windows = sizes.kv_windows
    return KvShape(
        keys=sizes.layer_keys,
        windows=windows,
        group_of=tuple(windows.index(window) for window in sizes.windows),
    )


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
