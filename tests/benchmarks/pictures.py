"""Vision towers as engine and trainer compute them, next to transformers' own forward, on a CPU.

    python tests/benchmarks/pictures.py gemma3 qwen3_vl --threads 2 --dtype bfloat16 --out pictures.json

For each family, of published widths and few layers with random weights: milliseconds of one picture (the least of
alternating calls), and how many times longer ours takes than transformers' with its fastest attention (`ratio`, the
median over the rounds). Bits of ours do not depend on threads, on other pictures or on the run; those of transformers
may.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.pictures.tower_forward import encode_picture, make_tower_exact
from rollout_engine.testing.tiny_pictures import tiny_vision_config

_SIGLIP: dict[str, Any] = dict(hidden_size=1152, intermediate_size=4304, num_attention_heads=16, patch_size=14)
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3": (_SIGLIP | dict(image_size=448), 32),
    "kimi_k25": (_SIGLIP | dict(pos_emb_height=64, pos_emb_width=64), 32),
    "llava": (
        dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, patch_size=14, image_size=336),
        24,
    ),
    "qwen3_vl": (
        dict(hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16, num_position_embeddings=2304),
        32,
    ),
}
"""Fields of the tower's configuration, and patches of a side of the picture."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=SIZES)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for family in args.families:
        result = measure(family, getattr(torch, args.dtype), args.layers, args.rounds)
        results.append({"family": family, "threads": args.threads, "dtype": args.dtype, **result})
        print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


@torch.inference_mode()
def measure(family: str, dtype: torch.dtype, num_layers: int, num_rounds: int) -> dict[str, float]:
    """Milliseconds of one picture by transformers and by us."""
    theirs, (_, side) = make_model(family, dtype, num_layers), SIZES[family]
    ours = copy.deepcopy(theirs)
    make_tower_exact(ours, make_row_invariant)
    theirs.set_attn_implementation("sdpa")
    picture = make_picture(theirs.config.vision_config, family, side)
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in picture.items()}
    calls: dict[str, Callable[[], object]] = {
        "transformers": lambda: theirs.get_image_features(**cast, return_dict=True),
        "ours": lambda: encode_picture(ours, picture),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(num_rounds + 1):
        for name in calls if turn % 2 else reversed(calls):
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    seconds = {name: each[1:] for name, each in seconds.items()}  # the first packs weights
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["transformers"], strict=True))
    fastest = {f"{name}_ms": round(min(each) * 1000, 1) for name, each in seconds.items()}
    return {"patches": side**2, **fastest, "ratio": round(ratio, 2)}


def make_model(family: str, dtype: torch.dtype, num_layers: int) -> Any:
    """A random composite with a tower of published widths."""
    config = tiny_vision_config(family)
    vision = config.vision_config
    depth = "depth" if hasattr(vision, "depth") else "num_hidden_layers"
    fields = vision.to_dict() | SIZES[family][0] | {depth: num_layers}
    if "deepstack_visual_indexes" in fields:
        fields["deepstack_visual_indexes"] = [0]
    config.vision_config = type(vision)(**fields)
    if family == "gemma3":
        config.mm_tokens_per_image = 256
    if family == "kimi_k25":
        config.projection_hidden_size = fields["hidden_size"]
    if family == "llava":
        config.vision_feature_layer = -2
    return AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()


def make_picture(vision: Any, family: str, side: int) -> dict[str, Tensor]:
    """Random arrays of a square picture of `side` patches."""
    patch, grid = vision.patch_size, torch.tensor([[1, side, side]])
    if family == "qwen3_vl":
        size = 3 * vision.temporal_patch_size * patch**2
        return {"pixel_values": torch.randn(side * side, size), "image_grid_thw": grid}
    if family == "kimi_k25":
        return {"pixel_values": torch.randn(side * side, 3, patch, patch), "image_grid_thw": grid}
    return {"pixel_values": torch.randn(1, 3, side * patch, side * patch)}


if __name__ == "__main__":
    main()
