"""RMSNorm (Zhang and Sennrich 2019), also with a gate; each row has the same bits in any batch."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.activation import sigmoid, silu
from rollout_engine.kernels.cpu import rows
from rollout_engine.kernels.cpu.arguments import argument_error

Kernel = Callable[[Tensor, Tensor, float], Tensor]
GatedKernel = Callable[..., Tensor]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, kernel: Kernel | None = None) -> Tensor:
    """RMSNorm of Llama, Qwen2 and Qwen3: weight * round(x / sqrt(mean(x^2) + epsilon)) over the last dimension.

    Any strides, contiguous result. float32 inside, rounded to `x.dtype` before and after the weight, which has that
    dtype too. `kernel` replaces the CPU's forward; it need not support gradients.
    """
    kernel = kernel or _forward
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _RMSNorm.apply(x, weight, epsilon, kernel)
        return out
    return kernel(x, weight, epsilon)


def offset_rms_norm(x: Tensor, weight: Tensor, epsilon: float, kernel: Kernel | None = None) -> Tensor:
    """RMSNorm of Gemma and Qwen3.5: (1 + weight) * x / sqrt(mean(x^2) + epsilon) over the last dimension.

    Any strides, contiguous result. float32 inside and rounded once, to `x.dtype`, which `weight` has too. `kernel` as
    that of `rms_norm`.
    """
    kernel = kernel or _forward_with_offset
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _RMSNorm.apply(x, weight, epsilon, kernel, 1.0)
        return out
    return kernel(x, weight, epsilon)


def single_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of Nemotron-H and OLMo 2: weight * x / sqrt(mean(x^2) + epsilon) over the last dimension.

    Any strides, contiguous result. float32 inside and rounded once, to `x.dtype`, which `weight` has too.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _RMSNorm.apply(x, weight, epsilon, _forward_rounded_once)
        return out
    return _forward_rounded_once(x, weight, epsilon)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    group_size: int,
    gate_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
    rounds_norm: bool = True,
    kernel: GatedKernel | None = None,
) -> Tensor:
    """RMSNorm of x [..., D] with a gate [..., D] and `weight` [D], in `x.dtype`; differentiable, of any strides.

    With f the activation and n the norm over each group of `group_size` channels, the result is weight * n(x * f(gate))
    with `gate_first` (Mamba 2), else weight * n(x) * f(gate) (Gated DeltaNet). float32 inside and rounded once at the
    end; with `rounds_norm` the norm is rounded before and after the weight too. All three are float32 or bfloat16.
    `kernel` replaces the CPU's forward, as that of `rms_norm` does. Raises `ValueError` for other shapes.
    """
    rule = _GateRule(group_size, gate_first, activation, rounds_norm)
    if gate.shape != x.shape:
        raise argument_error("gate", gate, f"{list(x.shape)} as x")
    if weight.shape != x.shape[-1:]:
        raise argument_error("weight", weight, f"{list(x.shape[-1:])}, the last dimension of x")
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f'activation should be "silu" or "sigmoid", and is {activation!r}.')
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size should divide {x.shape[-1]}, the last dimension of x, and is {group_size}.")
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or weight.requires_grad):
        return _GatedRMSNorm.apply(x, gate, weight, epsilon, rule, kernel)  # type: ignore[no-any-return]
    return _norm_with_gate(x, gate, weight, epsilon, rule, kernel)


def _forward(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if rows.supports(x, weight):
        return rows.norm(x, weight, epsilon)
    return weight * _normalised(x, epsilon)[0].to(x.dtype)


def _forward_with_offset(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if rows.supports(x, weight):
        return rows.norm(x, weight, epsilon, has_offset=True)
    return (_normalised(x, epsilon)[0] * (1.0 + weight.float())).to(x.dtype)


def _forward_rounded_once(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if rows.supports(x, weight):
        return rows.norm(x, weight, epsilon, rounds_once=True)
    return (_normalised(x, epsilon)[0] * weight.float()).to(x.dtype)


def _normalised(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x / rms, 1 / rms), float32."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + epsilon)
    return x32 * scale, scale


class _RMSNorm(torch.autograd.Function):
    """Backward of y = w n, n = x s, s = 1 / rms: dx = s (w dy - n mean(n w dy)), dw = sum(dy n); float32 inside.

    w is the weight, or 1 + weight if `offset` is 1.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernel: Kernel, offset: float = 0.0) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.offset = epsilon, offset
        return kernel(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        if rows.supports(x, weight):
            needs = dict(of_x=of_x, of_weight=of_weight, has_offset=bool(ctx.offset))
            grads = rows.norm_gradients(x, weight, grad, ctx.epsilon, **needs)
            return grads[0], None if grads[1] is None else grads[1].to(weight.dtype), None, None, None
        normalised, scale = _normalised(x, ctx.epsilon)
        grad32 = grad.float()
        grad_x = grad_weight = None
        if of_x:
            inner = grad32 * (ctx.offset + weight.float())
            mean = (inner * normalised).mean(-1, keepdim=True)
            grad_x = inner.sub_(normalised * mean).mul_(scale).to(x.dtype)
        if of_weight:
            grad_weight = (grad32 * normalised).flatten(0, -2).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None, None, None


class _GateRule(NamedTuple):
    """How a norm and a gate are combined: arguments of `gated_rms_norm`."""

    group_size: int
    gate_first: bool
    activation: str
    rounds_norm: bool


def _norm_with_gate(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, rule: _GateRule, kernel: GatedKernel | None
) -> Tensor:
    if kernel is None and not (rows.supports(x) and rows.supports(gate) and rows.supports(weight)):
        return _norm_with_gate_eagerly(x, gate, weight, epsilon, rule)
    return (kernel or rows.gated_norm)(
        x,
        gate,
        weight,
        epsilon,
        group_size=rule.group_size,
        gate_first=rule.gate_first,
        is_sigmoid=rule.activation == "sigmoid",
        rounds_norm=rule.rounds_norm,
    )


def _norm_with_gate_eagerly(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, rule: _GateRule) -> Tensor:
    """The eager twin, differentiable by torch itself."""
    factor = (sigmoid if rule.activation == "sigmoid" else silu)(gate.float())
    groups = (x.float() * factor if rule.gate_first else x.float()).unflatten(-1, (-1, rule.group_size))
    normal: Tensor = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + epsilon)).flatten(-2)
    if rule.rounds_norm:
        normal = normal.to(x.dtype).float()
    weighed = weight.float() * normal
    if rule.rounds_norm:
        weighed = weighed.to(x.dtype).float()
    return (weighed if rule.gate_first else weighed * factor).to(x.dtype)


class _GatedRMSNorm(torch.autograd.Function):
    """Backward of the eager twin without its roundings, float32 inside.

    y = w n(h) f(g), h = x, or w n(h), h = x f(g); n = h s, and with dn the gradient of n, dh = s (dn - n mean(n dn)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        epsilon: float,
        rule: _GateRule,
        kernel: GatedKernel | None,
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.epsilon, ctx.rule = epsilon, rule
        return _norm_with_gate(x, gate, weight, epsilon, rule, kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = saved = ctx.saved_tensors  # once: checkpointing of gradients counts
        rule: _GateRule = ctx.rule
        if rows.supports(x) and rows.supports(gate) and rows.supports(weight):
            options: dict[str, Any] = {"group_size": rule.group_size, "gate_first": rule.gate_first}
            options["is_sigmoid"] = rule.activation == "sigmoid"
            found = rows.gated_norm_gradients(x, gate, weight, grad, ctx.epsilon, **options)
            kept = zip(found, saved, ctx.needs_input_grad, strict=False)
            return *(each.to(of.dtype) if needs else None for each, of, needs in kept), None, None, None
        x32, gate32, grad32 = x.float(), gate.float(), grad.float()
        factor = (sigmoid if rule.activation == "sigmoid" else silu)(gate32)
        normal, scale = _normalised(
            (x32 * factor if rule.gate_first else x32).unflatten(-1, _groups(rule)), ctx.epsilon
        )
        of_weighed = grad32 if rule.gate_first else grad32 * factor
        of_normal = (of_weighed * weight.float()).unflatten(-1, _groups(rule))
        mean = (of_normal * normal).mean(-1, keepdim=True)
        of_input = (of_normal - normal * mean).mul_(scale).flatten(-2)
        flat = normal.flatten(-2)
        if rule.gate_first:
            grads = [of_input * factor, of_input * x32]
        else:
            grads = [of_input, grad32 * weight.float() * flat]
        grads[1] = _through_gate(grads[1], gate32, factor, rule)
        grads.append((of_weighed * flat).flatten(0, -2).sum(0))
        wanted = zip(grads, saved, ctx.needs_input_grad, strict=False)
        return *(each.to(of.dtype) if needs else None for each, of, needs in wanted), None, None, None


def _groups(rule: _GateRule) -> tuple[int, int]:
    return -1, rule.group_size


def _through_gate(grad: Tensor, gate: Tensor, factor: Tensor, rule: _GateRule) -> Tensor:
    """The gradient of a gate whose activation is `factor`, from that of the factor."""
    if rule.activation == "sigmoid":
        return grad * factor * (1.0 - factor)
    result: Tensor = torch.ops.aten.silu_backward(grad, gate)
    return result
