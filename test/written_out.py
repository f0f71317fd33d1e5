"""Modules of PyTorch written out, where their own derivatives are wrong or missing or their
submodules are not called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def written_out(model: nn.Module, bags: bool) -> nn.Module:
    """The model with modules written out where PyTorch's own have wrong or missing derivatives, or
    are called past their submodules; embedding bags only on request, since hooks see their options.
    """
    if isinstance(model, nn.MultiheadAttention):
        return Attention(model)
    for name, child in model.named_children():
        setattr(model, name, written_out(child, bags))
    forwards: dict[str, Callable[..., Tensor]] = {"GroupNorm": _group_norm}
    is_norm = isinstance(model, nn.modules.batchnorm._NormBase)
    if is_norm and (model.running_mean is None or not model.training):
        forwards[type(model).__name__] = _norm
    if bags:
        forwards |= {"EmbeddingBag": _bag, "_WeightNorm": _weight_norm}
    if type(model).__name__ in forwards:
        model.forward = partial(forwards[type(model).__name__], model)  # type: ignore[method-assign]
    return model


class Projection(nn.Module):
    """`W x + b` with parameters of somebody else's."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return linear(x, w, b)


class Attention(nn.Module):
    """What `nn.MultiheadAttention` computes, line by line, with its parameters under its names."""

    #: Layers that look here whether they may go past all submodules don't.
    _qkv_same_embed_dim = False

    def __init__(self, given: nn.MultiheadAttention) -> None:
        super().__init__()
        assert given.dropout == 0 or not given.training, "random masks have no definition"
        own = "in_proj_weight q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v"
        for name in own.split():
            self.register_parameter(name, getattr(given, name))
        self.out_proj = nn.Linear(1, 1)
        self.out_proj.weight, self.out_proj.bias = given.out_proj.weight, given.out_proj.bias
        self.q, self.k, self.v = Projection(), Projection(), Projection()
        self.embed_dim = given.embed_dim
        self.heads = given.num_heads
        self.zero = given.add_zero_attn
        self.num_heads, self.batch_first = given.num_heads, given.batch_first
        self.train(given.training)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            return tuple(self.in_proj_weight.unflatten(0, (3, -1)))  # type: ignore[return-value]
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        biases = (
            (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.unflatten(0, (3, -1))
        )
        xs, parts = (query, key, value), (self.q, self.k, self.v)
        q, k, v = (
            part(x, w, b) for part, x, w, b in zip(parts, xs, self.weights(), biases, strict=True)
        )
        N, L, E = q.shape
        extra = []
        if self.bias_k is not None:
            extra.append((self.bias_k.expand(N, 1, E), self.bias_v.expand(N, 1, E)))
        if self.zero:
            extra.append((q.new_zeros(N, 1, E),) * 2)
        seen = q.new_zeros(N, self.heads, L, k.shape[1])  # what is added to the scores
        for mask, shape in (
            (key_padding_mask, (N, 1, 1, -1)),
            (attn_mask, (-1, self.heads, L, k.shape[1])),
        ):
            if mask is None:
                continue
            mask = mask[None, None] if mask is attn_mask and mask.ndim == 2 else mask.reshape(shape)
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            seen = seen + mask
        for k_more, v_more in extra:
            k, v = torch.cat([k, k_more], 1), torch.cat([v, v_more], 1)
            seen = torch.cat([seen, seen.new_zeros(N, self.heads, L, 1)], -1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        p = (q @ k.mT / q.shape[-1] ** 0.5 + seen).softmax(-1)
        out = self.out_proj((p @ v).transpose(1, 2).flatten(2))
        p = p.mean(1) if average_attn_weights else p
        return out if self.batch_first else out.transpose(0, 1), p if need_weights else None


def _norm(m: Any, x: Tensor) -> Tensor:
    """Batch norm with stored statistics, and instance norm: PyTorch's misread gradients of one
    example.
    """
    shape, axes = [1, -1, *[1] * (x.ndim - 2)], tuple(range(2, x.ndim))
    if m.running_mean is None:
        mean, var = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    else:
        mean, var = m.running_mean.view(shape), m.running_var.view(shape)
    out = (x - mean) / (var + m.eps).sqrt()
    return out if m.weight is None else out * m.weight.view(shape) + m.bias.view(shape)


def _group_norm(m: Any, x: Tensor) -> Tensor:
    """Group norm: PyTorch's has a wrong second derivative of several vectors at once."""
    groups = x.unflatten(1, (m.num_groups, -1))
    axes = tuple(range(2, groups.ndim))
    mean, var = groups.mean(axes, keepdim=True), groups.var(axes, correction=0, keepdim=True)
    out = ((groups - mean) / (var + m.eps).sqrt()).flatten(1, 2)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    return out if m.weight is None else out * m.weight.view(shape) + m.bias.view(shape)


def _bag(m: Any, x: Tensor) -> Tensor:
    """An embedding bag of rows: PyTorch's has no second derivative."""
    bags = []
    for tokens in x:
        rows = m.weight[tokens if m.padding_idx is None else tokens[tokens != m.padding_idx]]
        if m.mode == "max" and len(rows):
            bags.append(rows.amax(0))
        else:
            bags.append(rows.sum(0) / (max(1, len(rows)) if m.mode == "mean" else 1))
    return torch.stack(bags)


def _weight_norm(m: Any, magnitude: Tensor, direction: Tensor) -> Tensor:
    """Weight normalisation: the second derivative of PyTorch's is wrong."""
    return direction * (magnitude / direction.square().sum(1, keepdim=True).sqrt())
