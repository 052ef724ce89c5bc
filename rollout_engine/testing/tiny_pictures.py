"""Tiny random models that take pictures, one of each family; `tiny_vision_checkpoint` writes a directory of one.

Each has a tokenizer of bytes and its family's special tokens, a chat template, and the files of its processor, and is
read by transformers as a released checkpoint is. Pictures are made small: a few dozen placeholders at most.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BaseImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rollout_engine.base.errors import ConfigError, unknown_name
from rollout_engine.testing.models import TINY_SIZES, byte_tokenizer
from rollout_engine.text.picture_processor import read_image_processor

_VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=2, patch_size=4
)
_PATCHES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=72, depth=2, num_heads=2, patch_size=4, temporal_patch_size=2, out_hidden_size=64
)
_MROPE: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
_INTERLEAVED = _MROPE | dict(mrope_interleaved=True)
_QWEN_TOKENS = dict(vision_start="<|vision_start|>", vision_end="<|vision_end|>", image="<|image_pad|>")
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_HALVES: dict[str, Any] = dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
_QWEN_IMAGES: dict[str, Any] = dict(
    image_processor_type="Qwen2VLImageProcessor",
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    size={"shortest_edge": 16 * 8, "longest_edge": 40 * 40},
)


class Family(NamedTuple):
    """How a family's tiny model is made."""

    text: dict[str, Any]
    """Fields of the text model's config."""
    vision: dict[str, Any]
    """Fields of the vision tower's config."""
    images: dict[str, Any]
    """Contents of preprocessor_config.json."""
    processor: str
    """Class of transformers' processor."""
    tokens: dict[str, str]
    """Special tokens by their names in the config; "image" is the placeholder."""
    picture: str
    """A picture in the chat template's output."""
    config: dict[str, Any] = {}
    """Further fields of the config; ids of tokens are added."""
    options: dict[str, Any] = {}
    """Contents of processor_config.json."""
    named: dict[str, str] = {}
    """Special tokens that the tokenizer has as attributes, by their names."""
    others: tuple[str, ...] = ()
    """Further special tokens."""


def _idefics(name: str) -> Family:
    """Idefics 3 and its descendants, which cut a picture into tiles; `name` is that of its processor's class."""
    return Family(
        text=TINY_SIZES | dict(model_type="llama"),
        vision=_VISION | dict(image_size=16),
        images=dict(
            image_processor_type=f"{name}ImageProcessor",
            size=dict(longest_edge=32),
            max_image_size=dict(longest_edge=16),
            do_image_splitting=True,
        ),
        processor=f"{name}Processor",
        tokens=dict(image="<image>"),
        picture="<image>",
        config=dict(scale_factor=2),
        options=dict(image_seq_len=4),
        others=(
            "<fake_token_around_image>",
            "<end_of_utterance>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        ),
    )


_TILES: dict[str, Any] = dict(
    image_processor_type="GotOcr2ImageProcessor",
    size=dict(height=16, width=16),
    crop_to_patches=True,
    min_patches=1,
    max_patches=4,
)
"""Settings of an image processor that cuts a picture into at most four tiles."""

FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        text=TINY_SIZES | dict(rope_parameters=_MROPE),
        vision=_PATCHES | dict(window_size=16, fullatt_block_indexes=[1]),
        images=_QWEN_IMAGES,
        processor="Qwen2_5_VLProcessor",
        tokens=_QWEN_TOKENS | dict(video="<|video_pad|>"),
        picture=_QWEN_PICTURE,
    ),
    "qwen3_vl": Family(
        text=TINY_SIZES | dict(rope_parameters=_INTERLEAVED, num_hidden_layers=3),
        vision=_PATCHES | dict(depth=3, num_position_embeddings=36, deepstack_visual_indexes=[0, 1]),
        images=_QWEN_IMAGES | _HALVES,
        processor="Qwen3VLProcessor",
        tokens=_QWEN_TOKENS | dict(video="<|video_pad|>"),
        picture=_QWEN_PICTURE,
    ),
    "qwen3_5": Family(
        text=TINY_SIZES
        | dict(
            rope_parameters=_INTERLEAVED | dict(mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=4,
        ),
        vision=_PATCHES | dict(num_position_embeddings=36),
        images=_QWEN_IMAGES | _HALVES,
        processor="Qwen3VLProcessor",
        tokens=_QWEN_TOKENS | dict(video="<|video_pad|>"),
        picture=_QWEN_PICTURE,
    ),
    "gemma3": Family(
        text=TINY_SIZES
        | dict(query_pre_attn_scalar=24, sliding_window=11, layer_types=["sliding_attention", "full_attention"]),
        vision=_VISION | dict(image_size=32, vision_use_head=False),
        images=dict(image_processor_type="Gemma3ImageProcessor", size=dict(height=32, width=32)) | _HALVES,
        processor="Gemma3Processor",
        tokens=dict(boi="<start_of_image>", eoi="<end_of_image>", image="<image_soft_token>"),
        picture="<start_of_image>",
        config=dict(mm_tokens_per_image=16),
        options=dict(image_seq_length=16),
        named=dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
    ),
    "gemma4": Family(
        text=TINY_SIZES
        | dict(
            sliding_window=19,
            layer_types=["sliding_attention", "full_attention"],
            global_head_dim=24,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=272,
            use_bidirectional_attention="vision",
        ),
        vision=_VISION | dict(num_key_value_heads=2, head_dim=16, pooling_kernel_size=2, position_embedding_size=64),
        images=dict(
            image_processor_type="Gemma4ImageProcessor", patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
        ),
        processor="Gemma4Processor",
        tokens=dict(boi="<|image>", eoi="<image|>", image="<|image|>", audio="<|audio|>", video="<|video|>"),
        picture="<|image|>",
        options=dict(image_seq_length=70),
        named=dict(
            boi_token="<|image>",
            eoi_token="<image|>",
            image_token="<|image|>",
            audio_token="<|audio|>",
            boa_token="<|audio>",
            eoa_token="<audio|>",
        ),
    ),
    "mistral3": Family(
        text=TINY_SIZES | dict(model_type="mistral", sliding_window=None),
        vision=_VISION | dict(image_size=40),
        images=dict(image_processor_type="PixtralImageProcessor", patch_size=8, size=dict(longest_edge=40)),
        processor="PixtralProcessor",
        tokens=dict(image="[IMG]"),
        picture="[IMG]",
        config=dict(spatial_merge_size=2),
        options=dict(patch_size=4, spatial_merge_size=2),
        others=("[IMG_BREAK]", "[IMG_END]"),
    ),
    "llava": Family(
        text=TINY_SIZES | dict(model_type="llama"),
        vision=_VISION | dict(model_type="clip_vision_model", image_size=24, num_hidden_layers=3),
        images=dict(
            image_processor_type="CLIPImageProcessor", size=dict(shortest_edge=24), crop_size=dict(height=24, width=24)
        ),
        processor="LlavaProcessor",
        tokens=dict(image="<image>"),
        picture="<image>\n",
        config=dict(image_seq_length=36),
        options=dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "llava_next": Family(
        text=TINY_SIZES | dict(model_type="llama"),
        vision=_VISION | dict(model_type="clip_vision_model", image_size=16, num_hidden_layers=3),
        images=dict(
            image_processor_type="LlavaNextImageProcessor",
            size=dict(shortest_edge=16),
            crop_size=dict(height=16, width=16),
            image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        ),
        processor="LlavaNextProcessor",
        tokens=dict(image="<image>"),
        picture="<image>\n",
        config=dict(image_seq_length=16, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]]),
        options=dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "aya_vision": Family(
        text=TINY_SIZES
        | dict(model_type="cohere2", sliding_window=19, layer_types=["sliding_attention", "full_attention"]),
        vision=_VISION | dict(model_type="siglip_vision_model", image_size=16, vision_use_head=False),
        images=_TILES,
        processor="AyaVisionProcessor",
        tokens=dict(image="<|IMG_PATCH|>"),
        picture="<image>",
        options=dict(patch_size=4, img_size=16, downsample_factor=2),
        others=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    ),
    "idefics3": _idefics("Idefics3"),
    "smolvlm": _idefics("SmolVLM"),
    "kimi_k25": Family(
        text=TINY_SIZES
        | dict(model_type="deepseek_v3", num_attention_heads=4, num_key_value_heads=4, head_dim=8, qk_rope_head_dim=8)
        | dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, v_head_dim=12, first_k_dense_replace=1)
        | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, n_group=1, topk_group=1),
        vision=_VISION | dict(pos_emb_height=6, pos_emb_width=6),
        images=dict(image_processor_type="Kimi_K25ImageProcessor", patch_size=4, max_patches=100),
        processor="Kimi_K25Processor",
        tokens=dict(image="<|media_pad|>", video="<|video_pad|>"),
        picture="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        config=dict(projection_hidden_size=32),
        others=("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    ),
    "internvl": Family(
        text=TINY_SIZES | dict(model_type="qwen2"),
        vision=_VISION | dict(image_size=16, patch_size=4),
        images=_TILES,
        processor="InternVLProcessor",
        tokens=dict(image="<IMG_CONTEXT>"),
        picture="<IMG_CONTEXT>\n",
        config=dict(image_seq_length=4),
        options=dict(image_seq_length=4),
        named=dict(
            start_image_token="<img>",
            end_image_token="</img>",
            context_image_token="<IMG_CONTEXT>",
            video_token="<video>",
        ),
    ),
}
"""By `model_type`."""


def _find_family(name: str) -> Family:
    """The family of this `model_type`. Raises `ConfigError` with the names of all."""
    if name not in FAMILIES:
        raise ConfigError(f"{unknown_name('family', name, FAMILIES)} There are {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer with a family's special tokens from id 259 on, and a chat template that shows pictures."""
    made, found = byte_tokenizer(), _find_family(family)
    texts = dict.fromkeys([*found.tokens.values(), *found.named.values(), *found.others])
    made.add_tokens([AddedToken(text, normalized=False, special=True) for text in texts], special_tokens=True)
    named = dict(extra_special_tokens=found.named) if found.named else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_chat_template(found.picture),
        clean_up_tokenization_spaces=False,
        **named,
    )


def tiny_vision_config(family: str, **overrides: Any) -> Any:
    """A Hugging Face config of a composite model with `model_type=family`; `overrides` go to its text model."""
    found, tokenizer = _find_family(family), vision_tokenizer(family)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(text) for name, text in found.tokens.items()}
    return AutoConfig.for_model(
        family,
        text_config=found.text | dict(vocab_size=-(-len(tokenizer) // 16) * 16) | overrides,
        vision_config=dict(found.vision),
        **(dict(tie_word_embeddings=False) | found.config | ids),
    )


def tiny_vision_model(
    family: str = "qwen3_vl",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.2,
    **overrides: Any,
) -> PreTrainedModel:
    """A random composite model: vision tower, projector and text; `std` of the weights as in `tiny_model`.

    `overrides` go to the config of its text model.
    """
    config = tiny_vision_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        with torch.no_grad():
            vectors = [(name, buffer) for name, buffer in model.named_buffers() if buffer.dim() == 1]
            for name, tensor in (*model.named_parameters(), *vectors):
                if tensor.dim() > 1:
                    tensor.normal_(0.0, std)
                elif name.endswith("bias"):
                    tensor.normal_(0.0, 0.1)
    model.eval()
    return model


def tiny_vision_checkpoint(directory: str | Path, family: str = "qwen3_vl", **kwargs: Any) -> Path:
    """Write a tiny model (arguments as for `tiny_vision_model`), its tokenizer and processor, and return the path.

    Raises `ConfigError` for a family that is not among `FAMILIES`.
    """
    path, found = Path(directory), _find_family(family)
    tiny_vision_model(family, **kwargs).save_pretrained(path)
    if family == "kimi_k25":
        name_as_published(path / "model.safetensors")
    vision_tokenizer(family).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))
    (path / "preprocessor_config.json").write_text(json.dumps(found.images))
    processor = read_image_processor(path)
    if isinstance(processor, BaseImageProcessor):  # as transformers writes it: with the defaults of its class
        processor.save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({"processor_class": found.processor} | found.options))
    return path


def name_as_published(file: Path) -> None:
    """Rename tensors of a kimi_k25: transformers 5.23 saves the "layers" of published ones as "blocks"."""
    from safetensors.torch import load_file, save_file

    before, after = (f"language_model.model.{name}" for name in ("blocks", "layers"))
    tensors = {name.replace(before, after): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def random_picture(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """A picture of random coloured squares, in RGB."""
    draws = np.random.default_rng(seed)
    squares = draws.integers(0, 256, (-(-height // 4), -(-width // 4), 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(4, 0).repeat(4, 1)[:height, :width])


def _chat_template(picture: str) -> str:
    return (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}" + picture + "{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
