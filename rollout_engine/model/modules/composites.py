"""Composites: models of several parts, such as text and vision, of which the text model alone is served.

    whole     Gemma3ForConditionalGeneration    model.language_model.layers.0..., model.vision_tower..., lm_head
    its text  Gemma3ForCausalLM                 model.layers.0...,                                       lm_head

The whole is built on torch's meta device, without memory, for the names that checkpoints have, and around a small text
model, to compare its logits.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.construct import give_memory
from rollout_engine.model.modules.geometry import Refusal

PICTURES = "pictures"
"""The attribute below a served text model that holds its composite's other parts; their weights' names begin so."""


class PartNames(NamedTuple):
    """How names of a composite's checkpoints begin."""

    text: list[tuple[str, str]]
    """Beginnings of names of the text model, and those of the text model alone."""
    others: list[str]
    """Beginnings of names of the other parts."""


class TextPart(NamedTuple):
    """The text model inside a composite."""

    decoder: PreTrainedModel
    decoder_path: str
    head: nn.Module
    head_path: str

    @classmethod
    def of(cls, whole: nn.Module) -> "TextPart":
        """Find it in a composite. Raises `Refusal` if it has no output head of its own."""
        owner: Any = whole
        decoder, head = owner.get_decoder().base_model, owner.get_output_embeddings()
        paths = {id(child): path for path, child in whole.named_modules()}
        if id(decoder) not in paths or id(head) not in paths or decoder is whole:
            raise Refusal(f"{type(whole).__name__} has no text model with an output head")
        return cls(decoder, paths[id(decoder)], head, paths[id(head)])


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a composite's text model; of any other model its own. Raises `Refusal` if it has several."""
    try:
        return config.get_text_config()
    except ValueError:
        raise Refusal("it has several text models, and one alone is served") from None


def is_composite(model: nn.Module) -> bool:
    """Whether it is a Hugging Face model with parts in addition to its text model."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return False
    try:
        return config.get_text_config() is not config
    except ValueError:  # there are several text models
        return True


def text_parts(model: nn.Module) -> list[nn.Module]:
    """The modules that compute text: a composite's text model, and a list with its head; any other model itself.

    Raises `ConfigError` for a composite without them.
    """
    if not is_composite(model):
        return [model]
    try:
        part = TextPart.of(model)
    except Refusal as reason:
        raise ConfigError(f"{type(model).__name__} cannot be exact: {reason}.") from None
    return [part.decoder, nn.ModuleList([part.head])]


def build_whole(
    config: PretrainedConfig, text_config: PretrainedConfig | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A composite without memory. `text_config`: of another text model in place of its own. `dtype`: None: its own.

    Raises `Refusal` if transformers cannot build it.
    """
    config = copy.deepcopy(config)
    if text_config is not None:
        own = config.get_text_config()
        name = next(name for name, value in vars(config).items() if value is own)
        setattr(config, name, text_config)
        config.tie_word_embeddings = getattr(text_config, "tie_word_embeddings", False)
    try:
        with torch.device("meta"):
            whole: PreTrainedModel = AutoModelForMultimodalLM.from_config(
                config,
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=False,
                **({} if dtype is None else {"dtype": dtype}),
            )
    except Exception as problem:  # foreign constructors may fail in any way
        text = str(problem).strip().splitlines()[0] if str(problem).strip() else ""
        raise Refusal(f"transformers does not build the whole of it ({type(problem).__name__}: {text})") from None
    return whole


class NoText(nn.Module):
    """Stands in a composite for a part of its text model that was removed."""


def remove_text(whole: PreTrainedModel) -> None:
    """Leave only the other parts of a composite, in place, under their names. Raises `Refusal` as `TextPart.of`."""
    part = TextPart.of(whole)
    for path in (part.decoder_path, part.head_path):
        parent, _, name = path.rpartition(".")
        setattr(whole.get_submodule(parent), name, NoText())


def twin_with(config: PretrainedConfig, text: PreTrainedModel) -> PreTrainedModel:
    """The composite around a text model with the weights of `text`, float32 on the CPU, in eager attention.

    Its other parts have no values: it computes text alone. Raises `Refusal` if `text` is not its text model.
    """
    whole: PreTrainedModel = build_whole(config, copy.deepcopy(text.config)).float().to_empty(device="cpu")
    part = TextPart.of(whole)
    give_memory(part.decoder, part.decoder, part.head)
    whole.tie_weights()
    try:
        part.decoder.load_state_dict(text.base_model.state_dict())
        part.head.load_state_dict(_head(text).state_dict())
    except RuntimeError as problem:
        raise Refusal(f"the text model of {type(whole).__name__} has other weights ({problem})") from None
    whole.eval().requires_grad_(False)
    return whole


def part_names(whole: PreTrainedModel, text: PreTrainedModel) -> PartNames:
    """The beginnings of names in checkpoints of a composite: as the module has them, and as it is published.

    `text`: its text model alone. Both may be without memory.
    """
    part = TextPart.of(whole)
    own = {part.decoder_path: text.base_model_prefix, part.head_path: _path(text, _head(text))}
    tensors = {name: tensor.to("meta") for name, tensor in whole.state_dict().items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    published = {name: names.get(id(tensor)) for name, tensor in revert_weight_conversion(whole, tensors).items()}
    found: dict[str, str] = {f"{path}.": f"{mine}." for path, mine in own.items()}
    texts = {name for name in tensors if name.startswith(tuple(found))}
    others = set(tensors) - texts
    for name, inside in published.items():
        path = next((path for path in own if inside is not None and inside.startswith(f"{path}.")), None)
        if path is not None and inside is not None:
            rest = inside.removeprefix(f"{path}.")
            shared = _shared_end(name, rest)
            found[name.removesuffix(shared)] = f"{own[path]}.{rest.removesuffix(shared)}"
            texts.add(name)
        elif inside is not None:
            others.add(name)
    pairs = {theirs: mine for theirs, mine in found.items() if theirs not in ("", mine)}
    others |= {name for name, inside in published.items() if inside is None and not name.startswith(tuple(found))}
    return PartNames(sorted(pairs.items(), key=lambda pair: -len(pair[0])), sorted(set(_beginnings(others, texts))))


def adopt_conversions(text: PreTrainedModel, config: PretrainedConfig) -> None:
    """Have a text model that transformers has no causal LM of store stacked weights as its composite does.

    `config`: the composite's.
    """
    if text.is_custom_code():
        found = get_checkpoint_conversion_mapping(config.model_type) or []
        owner: Any = text
        owner._weight_conversions = [each for each in found if isinstance(each, WeightConverter)]


def check_layouts(whole: PreTrainedModel, text: PreTrainedModel) -> None:
    """Raise `Refusal` unless checkpoints of a composite have its text model's weights as those of `text` have them.

    Both have the same small weights. Names may differ in their beginnings.
    """
    part, beginnings = TextPart.of(whole), part_names(whole, text).text
    paths = f"{part.decoder_path}.", f"{part.head_path}."
    state = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith(paths)}
    same = {id(tensor) for tensor in state.values()}
    own = revert_weight_conversion(text, text.state_dict()) | text.state_dict()  # a name has one layout
    for name, tensor in revert_weight_conversion(whole, state).items():
        theirs, mine = next((pair for pair in beginnings if name.startswith(pair[0])), ("", ""))
        found = own.get(mine + name.removeprefix(theirs))
        has_other_name_at_most = id(tensor) in same
        if not has_other_name_at_most and (found is None or not torch.equal(found, tensor)):
            raise Refusal(f"checkpoints of the whole store '{name}' in another layout than its text model does")


def _head(text: PreTrainedModel) -> nn.Module:
    head: nn.Module | None = text.get_output_embeddings()
    assert head is not None, "a causal LM"
    return head


def _path(module: nn.Module, wanted: nn.Module) -> str:
    return str(next(path for path, child in module.named_modules() if child is wanted))


def _shared_end(name: str, other: str) -> str:
    """The parts that end both names."""
    ends: list[str] = []
    for mine, its in zip(reversed(name.split(".")), reversed(other.split(".")), strict=False):
        if mine != its:
            break
        ends.insert(0, mine)
    return ".".join(ends)


def _beginnings(names: Iterable[str], others: Iterable[str]) -> Iterator[str]:
    """For each name its shortest beginning, of whole parts, with which none of `others` begins."""
    taken = {beginning for name in others for beginning in _parents(name)}
    for name in names:
        yield next((each for each in _parents(name) if each not in taken), name)


def _parents(name: str) -> Iterator[str]:
    """ "a.b.c" -> "a.", "a.b."."""
    parts = name.split(".")
    return (".".join(parts[:i]) + "." for i in range(1, len(parts)))
