"""Weights whose greedy token spells their version, so that torn weights, stale KV and wrong versions become visible."""

from typing import Any

import torch
from transformers import PreTrainedModel


def spelled_token(version: int) -> int:
    """The greedy token of `spelling_state_dict(model, version)` after every prompt; never a special token."""
    return 3 + version % 251


def spelling_state_dict(model: PreTrainedModel, version: int) -> dict[str, torch.Tensor]:
    """Weights with which a `tiny_model` (Llama, Qwen2, Qwen3) greedily decodes `spelled_token(version)`.

    A parameter of another version almost surely yields the token of neither. The residual stream holds a constant, the
    parity of the input token, that parity as fetched by attention, and a code.

    * Layers add large random shares to the code; only the sum of all correct shares spells the version.
    * Queries and keys have one random direction, rotated by RoPE, so a token attends to itself. The MLP adds noise
      if the fetched parity differs from the token's own. So q and k matter only in a context of even and odd ids.
    * Final norm and head have random signs, without which the code reads as another token.
    """
    architecture, vocab_size = model.config.model_type, model.config.vocab_size
    if architecture not in ("llama", "qwen2", "qwen3") or vocab_size < 254:
        found = f"{architecture} with {vocab_size}"
        raise ValueError(f"spelling needs a Llama, Qwen2 or Qwen3 with at least 254 tokens, not a {found}.")
    return _Speller(model, version).spell()


class _Speller:
    """Writes the tensors in the order of the forward, in float64.

    `stream` is the residual stream so far at an even token: [constant, parity, fetched parity, code...].
    """

    CONSTANT, CODE, SHARE, NOISE, SHARPNESS = 2000.0, 4.0, 128.0, 100.0, 13.0

    def __init__(self, model: Any, version: int) -> None:
        self.config = model.config
        self.activation = model.model.layers[0].mlp.act_fn
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = {}
        self.random = torch.Generator().manual_seed(version)
        code_size = self.config.hidden_size - 3
        codebook = self._signs(self.config.vocab_size, code_size, generator=torch.Generator().manual_seed(0))
        self.head, self.norm_signs = codebook * self._signs(code_size), self._signs(code_size)
        self.code = self.CODE * self.head[spelled_token(version)] * self.norm_signs
        share = self._share()
        share[3:] -= share[3:] @ self.code / self.code.square().sum() * self.code  # invisible to a tied head
        self.stream = share + torch.nn.functional.pad(torch.tensor([self.CONSTANT, 1.0]), (0, code_size + 1))

    def spell(self) -> dict[str, torch.Tensor]:
        """All parameters by name, in the model's dtypes."""
        self._write_embedding()
        num_layers = self.config.num_hidden_layers
        for i in range(num_layers):
            self._write_attention(f"model.layers.{i}.")
            self._write_mlp(f"model.layers.{i}.", is_last=i == num_layers - 1)
        self.tensors["model.norm.weight"] = torch.cat([torch.zeros(3), 100.0 * self.norm_signs])
        return {name: self.tensors[name].to(like.dtype) for name, like in self.parameters.items()}

    def _write_embedding(self) -> None:
        embedding = self.stream.repeat(self.config.vocab_size, 1)
        embedding[1::2, 1] = -1
        head = torch.nn.functional.pad(self.head, (3, 0))
        tied = self.config.tie_word_embeddings
        self.tensors["model.embed_tokens.weight"] = embedding + head if tied else embedding
        self.tensors["lm_head.weight"] = embedding + head if tied else head

    def _write_attention(self, layer: str) -> None:
        scale = self._write_norm(layer + "input_layernorm")
        num_kv = self.config.num_key_value_heads
        group = self.config.num_attention_heads // num_kv
        head_dim = self.parameters[layer + "self_attn.v_proj.weight"].shape[0] // num_kv
        angles = torch.rand(num_kv, head_dim // 2, generator=self.random, dtype=torch.float64) * (2 * torch.pi)
        direction = torch.cat([angles.cos(), angles.sin()], -1) * 2**0.5  # RoPE rotates pairs (i, i + head_dim / 2)
        for name, repeat in (("q", group), ("k", 1)):
            shown = direction.repeat_interleave(repeat, 0) * self._sharpen(
                f"{layer}self_attn.{name}_norm.weight", head_dim
            )
            self._write_reader(f"{layer}self_attn.{name}_proj", scale, shown.flatten(), {})
        constant, parity = self._normal(2, num_kv * head_dim)
        self._write_reader(layer + "self_attn.v_proj", scale, constant, {1: parity})
        seen = torch.stack([constant, parity]).view(2, num_kv, head_dim).repeat_interleave(group, 1).flatten(1)
        share = self._share()
        self._write_writer(layer + "self_attn.o_proj", seen, share, torch.eye(len(self.stream))[2].double())
        self.stream = self.stream + share
        self.stream[2] += 1

    def _write_mlp(self, layer: str, is_last: bool) -> None:
        scale = self._write_norm(layer + "post_attention_layernorm")
        gate, up, noticed = self._normal(3, self.config.intermediate_size)
        self._write_reader(layer + "mlp.gate_proj", scale, gate, {})
        self._write_reader(layer + "mlp.up_proj", scale, up, {1: noticed, 2: -noticed})
        share, noise = self._share(), self._share() * (self.NOISE / self.SHARE)
        if is_last:
            share[3:] = self.code - self.stream[3:]
        self._write_writer(layer + "mlp.down_proj", self.activation(gate) * torch.stack([up, noticed]), share, noise)
        self.stream = self.stream + share

    def _write_norm(self, name: str) -> torch.Tensor:
        """Write a random norm; returns the normalised stream at an even token."""
        weight = self._signs(len(self.stream)) * self._normal(len(self.stream)).exp()
        self.tensors[name + ".weight"] = weight
        normalised: torch.Tensor = (
            self.stream * weight / (self.stream.square().mean() + self.config.rms_norm_eps).sqrt()
        )
        return normalised

    def _sharpen(self, name: str, head_dim: int) -> torch.Tensor | float:
        """Factor of a query or key before its norm, if there is one, that gives the sharp direction after it."""
        if name not in self.parameters:
            return self.SHARPNESS
        signs = self._signs(head_dim)
        self.tensors[name] = signs * self.SHARPNESS
        return signs

    def _write_reader(
        self, name: str, scale: torch.Tensor, constant: torch.Tensor, parities: dict[int, torch.Tensor]
    ) -> None:
        """Write a projection that yields `constant` plus `parities[i]` times the sign of coordinate i of the stream."""
        weight = torch.zeros(self.parameters[name + ".weight"].shape, dtype=torch.float64)
        weight[:, 0] = (constant - self._write_bias(name, 4 * float(constant.abs().max()))) / scale[0]
        for i, vector in parities.items():
            weight[:, i] = vector / scale[i]
        self.tensors[name + ".weight"] = weight

    def _write_writer(self, name: str, seen: torch.Tensor, *outputs: torch.Tensor) -> None:
        """Write a projection that maps seen[0] + s * seen[1] to outputs[0] + s * outputs[1], for any s."""
        first, second = outputs
        targets = torch.stack([first - self._write_bias(name, self.SHARE), second], -1)
        self.tensors[name + ".weight"] = targets @ torch.linalg.pinv(seen.T)

    def _write_bias(self, name: str, size: float) -> torch.Tensor | float:
        """Write a random bias and return it, if the projection has one; 0 otherwise."""
        if name + ".bias" not in self.parameters:
            return 0.0
        self.tensors[name + ".bias"] = size * self._normal(len(self.parameters[name + ".bias"]))
        return self.tensors[name + ".bias"]

    def _share(self) -> torch.Tensor:
        return torch.nn.functional.pad(self._normal(len(self.code)) * self.SHARE, (3, 0))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def _signs(self, *shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=generator or self.random).double() * 2 - 1
