"""The rule of modules that have no other: any inputs, any parameters, nothing of the user's
changed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils._pytree import register_pytree_node, tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import LayerRule, differentiable_parameters, replay, rule_of

V = 2
B = 4  # as many as there are features: axes that are mixed up must show in the numbers


class Custom(nn.Module):
    """Several inputs by position and keyword, a 0-d parameter, a frozen and an unused one, a
    buffer, a child.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.token = nn.Parameter(torch.randn(1, 4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.integers = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1]))
        self.child = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(
        self,
        x: Tensor,
        pair: tuple[Tensor, Tensor],
        shift: float,
        *,
        gate: Tensor | None = None,
        table: Tensor,
    ) -> Tensor:  # [B, T, 4]
        hidden = self.child(x + self.token) * self.scale * self.mask + shift * self.integers
        hidden = torch.cat(
            [self.token.expand(len(x), 1, 4), hidden, pair[0][:, None] * self.frozen], 1
        )
        return hidden * pair[1][:, None, None] * gate.sigmoid() + table[: hidden.shape[1]]


class InPlace(nn.Module):
    """Writes into its input, into a buffer, and into what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("out", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        hidden = x @ self.weight
        hidden.relu_()
        self.out.copy_(hidden.detach().sum(0, keepdim=True))
        return hidden.square()


class ControlFlow(nn.Module):
    """Decides by the numbers it sees: `vmap` cannot do this."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [row * self.weight if row.sum().item() > 0 else row - self.weight for row in x]
        )


class Remembers(nn.Module):
    """Keeps what it computed in an attribute, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last, self.calls = nn.Parameter(torch.randn(4)), None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.calls = x * self.weight, self.calls + 1
        return self.last.exp()


class Twice(nn.Module):
    """One parameter under two names, and once more in a child that has to answer for its own
    use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.same = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.same


class Affine(torch.autograd.Function):
    """An operation that functorch cannot differentiate: `forward` takes the context, as before
    torch 2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class OldFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return Affine.apply(x, self.weight)


class Scaled(nn.Module):
    """A parametrization with parameters of its own, of which one belongs to a child."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3, 1))
        self.mix = nn.Linear(4, 4, bias=False)

    def forward(self, weight: Tensor) -> Tensor:
        return self.mix(weight.tanh()) * self.gain


def parametrized(
    kind: type[nn.Module], *args: Any, name: str = "weight", **options: Any
) -> nn.Module:
    module = kind(*args, **options)
    parametrize.register_parametrization(module, name, Scaled())
    return module


def twice_parametrized() -> nn.Module:
    module = parametrizations.weight_norm(nn.Linear(4, 3), dim=None)
    parametrize.register_parametrization(module, "weight", Scaled())
    return module


def shared_parametrization() -> nn.Module:
    """One computed weight has a parameter of the module as its own."""
    module = parametrized(nn.Linear, 4, 3)
    scaled = module.parametrizations["weight"][0]
    assert isinstance(scaled, Scaled)
    scaled.gain = nn.Parameter(module.bias[:, None].detach().clone())
    module.same = scaled.gain
    return module


def pruned() -> nn.Module:
    module = nn.Linear(4, 3)
    prune.random_unstructured(module, "weight", amount=0.4)
    prune.l1_unstructured(module, "bias", amount=1)
    return module


@dataclass
class Output:
    """A type that PyTorch's pytrees know."""

    hidden: Tensor
    count: int
    ids: Tensor | None


register_pytree_node(Output, lambda o: ([o.hidden, o.count, o.ids], None), lambda v, _: Output(*v))


class Several(nn.Module):
    """Returns all sorts of things; some do not depend on the parameters, others have no
    gradient.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Any:  # [B, T, 4]
        y = x @ self.weight + self.bias
        best = y.argmax(-1)
        return {
            "tuple": (y, (y.square().sum(1), x.cos())),
            "dict": {"ids": best, "logits": y, "past": None, "loss": y.exp().sum((1, 2))},
            "type": [Output(y, 3, best), Output(y.sin()[:, 0], 2, None)],
            "one": [y.tanh(), None],
            "scalars": (y.mean((1, 2)), y[:, :1]),
        }[self.kind]


@dataclass
class Case:
    name: str
    make: Any
    args: Any = ()  # functions, called late: inputs in double precision, after the seed
    kwargs: Any = dict


def randn(*shape: int) -> Any:
    return lambda: (torch.randn(B, *shape),)


def custom_args() -> Any:
    return torch.randn(B, 5, 4), (torch.randn(B, 4), torch.randn(B)), 0.5


def custom_kwargs() -> Any:
    return {"gate": torch.randn(B, 7, 1), "table": torch.randn(9, 4)}


SEVERAL = ["tuple", "dict", "type", "one", "scalars"]
CASES = [
    Case("LayerNorm", lambda: nn.LayerNorm((5, 4)), randn(2, 5, 4)),
    Case("LayerNorm-no-bias", lambda: nn.LayerNorm(4, bias=False), randn(4)),
    Case("RMSNorm", lambda: nn.RMSNorm(4), randn(5, 4)),
    Case("GroupNorm", lambda: nn.GroupNorm(2, 4), randn(4, 3, 2)),
    Case("InstanceNorm", lambda: nn.InstanceNorm2d(4, affine=True), randn(4, 3, 2)),
    Case("BatchNorm1d", lambda: nn.BatchNorm1d(4).eval(), randn(4)),
    Case("BatchNorm2d", lambda: nn.BatchNorm2d(4).eval(), randn(4, 3, 2)),
    Case("Embedding", lambda: nn.Embedding(6, 4), lambda: (torch.randint(6, (B, 5)),)),
    Case(
        "Embedding-padding",
        lambda: nn.Embedding(6, 4, padding_idx=0),
        lambda: (torch.randint(6, (B,)),),
    ),
    Case(
        "Embedding-sparse",
        lambda: nn.Embedding(6, 4, sparse=True),
        lambda: (torch.randint(6, (B, 5)),),
    ),
    Case(
        "Embedding-max-norm",
        lambda: nn.Embedding(6, 4, max_norm=1.0),
        lambda: (torch.randint(6, (B, 5)),),
    ),
    Case(
        "EmbeddingBag",
        lambda: nn.EmbeddingBag(6, 4, mode="max"),
        lambda: (torch.randint(6, (B, 5)),),
    ),
    Case("PReLU", lambda: nn.PReLU(4), randn(4, 2)),
    Case("Bilinear", lambda: nn.Bilinear(4, 3, 2), lambda: (torch.randn(B, 4), torch.randn(B, 3))),
    Case(
        "Bilinear-keyword",
        lambda: nn.Bilinear(4, 3, 2),
        randn(4),
        lambda: {"input2": torch.randn(B, 3)},
    ),
    Case("GRUCell", lambda: nn.GRUCell(4, 3), lambda: (torch.randn(B, 4), torch.randn(B, 3))),
    Case("RNNCell", lambda: nn.RNNCell(4, 4, bias=False), randn(4)),
    Case("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 4, 3, dilation=2), randn(4, 4)),
    Case(
        "ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), randn(4, 3, 2)
    ),
    Case(
        "ConvTranspose3d",
        lambda: nn.ConvTranspose3d(4, 4, 2, output_padding=0, bias=False),
        randn(4, 2, 2, 1),
    ),
    Case("depthwise", lambda: nn.Conv1d(4, 4, 3, groups=4, padding="same"), randn(4, 6)),
    Case("weight-norm", lambda: weight_norm(nn.Linear(4, 3)), randn(4)),
    Case("spectral-norm", lambda: spectral_norm(nn.Linear(4, 3)).eval(), randn(4)),
    Case("parametrized", lambda: parametrizations.weight_norm(nn.Linear(4, 3)), randn(4)),
    Case(
        "parametrized-conv",
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2, groups=1)),
        randn(4, 4),
    ),
    Case(
        "parametrized-bias", lambda: parametrizations.weight_norm(nn.Linear(4, 3), "bias"), randn(4)
    ),
    Case(
        "parametrized-spectral",
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
        randn(4),
    ),
    Case("parametrized-exp", lambda: parametrizations.orthogonal(nn.Linear(4, 4)), randn(4)),
    Case("parametrized-own", lambda: parametrized(nn.Linear, 4, 3), randn(2, 4)),
    Case(
        "parametrized-embedding",
        lambda: parametrized(nn.Embedding, 3, 4),
        lambda: (torch.randint(3, (B, 5)),),
    ),
    Case("parametrized-twice", twice_parametrized, randn(4)),
    Case("parametrized-shared", shared_parametrization, randn(4)),
    Case("pruned", pruned, randn(4)),
    *[Case(f"several-{kind}", lambda k=kind: Several(k), randn(2, 4)) for kind in SEVERAL],
    Case("custom", Custom, custom_args, custom_kwargs),
    Case("in-place", InPlace, randn(4)),
    Case("control-flow", ControlFlow, randn(4)),
    Case("remembers", Remembers, randn(4)),
    Case("old-function", OldFunction, randn(4)),
    Case("two-names", Twice, randn(4)),
]
# vmap cannot do these; everything else must not fall back to the loop.
SLOW = {
    "in-place",
    "control-flow",
    "old-function",
    "Embedding-sparse",
    "Embedding-max-norm",
    "RNNCell",
}


def build(case: Case, V: int = V) -> tuple[nn.Module, Any, Any, Any]:
    module, args, kwargs = case.make(), case.args(), case.kwargs()
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.ndim:
            buffer.uniform_(0.5, 1.5)
    with torch.no_grad():
        out = module(*copies(args), **kwargs)
    found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    g = [torch.randn(V, *t.shape) for t in found]
    return module, args, kwargs, g[0] if isinstance(out, Tensor) else g


def copies(args: Any) -> Any:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args)


@pytest.fixture
def differentiable(loop: Any) -> Any:
    """The slow twin with every parameter differentiable while it runs."""

    def run(module: nn.Module, args: Any, kwargs: Any, g: Any) -> Any:
        flags = {p: p.requires_grad for p in module.parameters()}
        for p in flags:
            p.requires_grad_(p.is_floating_point())
        result = loop(module, args, kwargs, g)
        for p, flag in flags.items():
            p.requires_grad_(flag)
        return result

    return run


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
class TestEveryModule:
    @pytest.mark.parametrize("vectors", [V, B])
    def test_equals_the_loop(
        self, case: Case, vectors: int, differentiable: Any, same: Any
    ) -> None:
        """Nested `vmap` mixes up vectors and examples for some layers, and shapes tell only if they
        differ.
        """
        module, args, kwargs, g = build(case, V=vectors)
        with torch.set_grad_enabled(vectors == B):
            ours = LayerRule().per_example_grads(module, args, kwargs, g)
        same(ours, differentiable(module, args, kwargs, g))

    def test_own_rule_agrees(self, case: Case, same: Any) -> None:
        module, args, kwargs, g = build(case)
        ours = rule_of(module).per_example_grads(module, args, kwargs, g)
        same(ours, LayerRule().per_example_grads(module, args, kwargs, g))

    def test_pieces_are_the_whole(
        self, case: Case, same: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, args, kwargs, g = build(case)
        whole = LayerRule().per_example_grads(module, args, kwargs, g)
        monkeypatch.setattr(LayerRule, "max_bytes", 1)
        same(LayerRule().per_example_grads(module, args, kwargs, g), whole)

    def test_vmap_is_used_where_it_can_be(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, args, kwargs, g = build(case)
        looped = []
        original = replay.Call.one_by_one
        monkeypatch.setattr(replay.Call, "one_by_one", lambda *a: looped.append(1) or original(*a))
        LayerRule().per_example_grads(module, args, kwargs, g)
        assert bool(looped) == (case.name in SLOW)

    def test_module_is_left_as_found(self, case: Case) -> None:
        module, args, kwargs, g = build(case)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        if isinstance(module, Remembers):
            del module.last  # must not be there afterwards either

        def everything() -> list[Any]:
            tensors = [
                *module.parameters(),
                *module.buffers(),
                *(p.grad for p in module.parameters()),
            ]
            tensors += [t for t in tree_leaves((args, kwargs, g)) if isinstance(t, Tensor)]
            flags = [p.requires_grad for p in module.parameters()] + [
                m.training for m in module.modules()
            ]
            attributes = {
                (name, k): [id(v), *([id(t) for t in v] if isinstance(v, (list, dict)) else [])]
                for name, m in module.named_modules()
                for k, v in vars(m).items()
            }
            identity = [id(t) for t in tensors]
            return [
                flags,
                identity,
                attributes,
                [t._version for t in tensors],
                [t.tolist() for t in tensors],
                torch.get_rng_state(),
            ]

        before = everything()
        LayerRule().per_example_grads(module, args, kwargs, g)
        after = everything()
        assert torch.equal(before.pop(), after.pop())
        assert before == after


def test_no_parameters_and_no_dependence() -> None:
    assert (
        LayerRule().per_example_grads(nn.ReLU(), (torch.randn(B, 2),), {}, torch.randn(V, B, 2))
        == {}
    )

    class Ignores(ControlFlow):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    J = LayerRule().per_example_grads(Ignores(), (torch.randn(B, 4),), {}, torch.randn(V, B, 4))
    assert J["weight"].shape == (V, B, 4)
    assert not J["weight"].any()


def test_inputs_that_all_examples_share(same: Any) -> None:
    """A table of positions, called with one example's worth of positions: its output was
    expanded.
    """
    module, g = nn.Embedding(6, 4), torch.randn(V, B, 5, 4)
    shared = LayerRule().per_example_grads(module, (torch.arange(5)[None],), {}, g)
    same(shared, LayerRule().per_example_grads(module, (torch.arange(5).expand(B, 5),), {}, g))


class Returns(ControlFlow):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x * self.weight)


class Cached(ControlFlow):
    """The rows that a cache holds, which is no tensor, are those of the whole batch."""

    def forward(self, x: Tensor, cache: SimpleNamespace) -> Tensor:  # type: ignore[override]
        return torch.cat([cache.rows, x * self.weight], 1)[:, -4:]


OTHER = r"It returned a %s with floating-point tensors of shapes \[.*, and its output gradients have \[\[4\]\] for one exam"
REFUSED: list[tuple[Any, tuple[Any, ...], str]] = [
    (
        lambda: nn.BatchNorm1d(4),
        (),
        r"BatchNorm1d in training mode.*statistics of the batch.*eval\(\)",
    ),
    (
        lambda: nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(4))),
        (),
        r"\('norm' of Sequential\) in tr",
    ),
    (
        lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(),
        (),
        "with track_running_stats=False",
    ),
    (lambda: Returns(nn.functional.dropout), (), r"draws random numbers.*model.eval\(\)"),
    (
        Cached,
        (SimpleNamespace(rows=torch.ones(B, 2)),),
        r"RuntimeError: Sizes.*use_cache=False.*@reg",
    ),
    (lambda: Returns(lambda y: y.argmax(-1)), (), OTHER % "Tensor"),
    (lambda: Returns(lambda y: {y}), (), OTHER % "set"),
    (lambda: Returns(torch.fft.fft), (), OTHER % "Tensor"),
    (lambda: nn.LSTMCell(4, 4), (), OTHER % "tuple"),
    (lambda: Returns(lambda y: torch.cat([y, y], 1)), (), OTHER % "Tensor"),
]


@pytest.mark.parametrize(("make", "more", "words"), REFUSED)
def test_refusals(make: Any, more: tuple[Any, ...], words: str) -> None:
    module, x, g = make(), torch.randn(B, 4), torch.randn(V, B, 4)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=words):
        LayerRule().per_example_grads(module, (x, *more), {}, g)
    assert torch.equal(before, torch.get_rng_state())


# --------------------------------------------------------------------------------- parametrizations


def test_parameters_behind_parametrizations_are_named() -> None:
    module = twice_parametrized()
    assert list(differentiable_parameters(module)) == [
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
        "parametrizations.weight.1.gain",
        "parametrizations.weight.1.mix.weight",
    ]
    shared = differentiable_parameters(shared_parametrization())
    assert len({id(p) for p in shared.values()}) == len(shared)
    parent = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))
    assert differentiable_parameters(parent) == {}


# ----------------------------------------------------------------------------- axes of the examples


class TimeFirst(nn.Module):
    """Examples are on axis 1 of sequences and on the last of a table; a bias is broadcast over
    them, a mask is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, shared: Tensor, *, table: Tensor, mask: Tensor) -> Any:
        y = (x @ self.weight).cumsum(0) * mask[
            :, None, None
        ] + shared  # [T, B, 3], shared [T, 1, 3]
        return {
            "y": y,
            "last": y[-1],
            "table": (y.sum(0) @ self.weight).sin().T * table,
        }  # table [3, B]


@pytest.mark.parametrize("slow", [False, True])
def test_axes(slow: bool, loop: Any, same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if slow:
        monkeypatch.setattr(replay.Call, "all_at_once", lambda *_: 1 / 0)
    T = 5
    module, x, shared = TimeFirst(), torch.randn(B, T, 3), torch.randn(T, 1, 3)
    kwargs = {"table": torch.randn(B, 3), "mask": torch.randn(T)}
    in_axes, out_axes = [1, 1, 1, 0], [1, 0, 1]
    g = [torch.randn(V, B, T, 3), torch.randn(V, B, 3), torch.randn(V, B, 3)]
    expected = loop(module, (x, shared), kwargs, g, in_axes, out_axes)
    # What is broadcast over the examples comes with its axis of size one first, or as the module
    # wants it.
    same(
        LayerRule().replay(module, (x, shared.movedim(1, 0)), kwargs, g, in_axes, out_axes),
        expected,
    )
    same(LayerRule().replay(module, (x, shared), kwargs, g, in_axes, out_axes), expected)
    assert expected["weight"].abs().sum() > 0
