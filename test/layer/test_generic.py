"""The rule of modules that have no other: any inputs, any parameters, nothing of the user's changed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import LayerRule, replay, rule_of

V = 2
B = 4  # as many as there are features: axes that are mixed up must show in the numbers


class Custom(nn.Module):
    """Several inputs by position and keyword, a 0-d parameter, a frozen and an unused one, a buffer, a child."""

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
        self, x: Tensor, pair: tuple[Tensor, Tensor], shift: float, *, gate: Tensor | None = None, table: Tensor
    ) -> Tensor:  # [B, T, 4]
        hidden = self.child(x + self.token) * self.scale * self.mask + shift * self.integers
        hidden = torch.cat([self.token.expand(len(x), 1, 4), hidden, pair[0][:, None] * self.frozen], 1)
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
        return torch.stack([row * self.weight if row.sum().item() > 0 else row - self.weight for row in x])


class Remembers(nn.Module):
    """Keeps what it computed in an attribute, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last, self.calls = nn.Parameter(torch.randn(4)), None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.calls = x * self.weight, self.calls + 1
        return self.last.exp()


class Twice(nn.Module):
    """One parameter under two names, and once more in a child that has to answer for its own use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.same = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.same


class Affine(torch.autograd.Function):
    """An operation that functorch cannot differentiate: `forward` takes the context, as before torch 2."""

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


CASES = [
    Case("LayerNorm", lambda: nn.LayerNorm((5, 4)), randn(2, 5, 4)),
    Case("LayerNorm-no-bias", lambda: nn.LayerNorm(4, bias=False), randn(4)),
    Case("RMSNorm", lambda: nn.RMSNorm(4), randn(5, 4)),
    Case("GroupNorm", lambda: nn.GroupNorm(2, 4), randn(4, 3, 2)),
    Case("InstanceNorm", lambda: nn.InstanceNorm2d(4, affine=True), randn(4, 3, 2)),
    Case("BatchNorm1d", lambda: nn.BatchNorm1d(4).eval(), randn(4)),
    Case("BatchNorm2d", lambda: nn.BatchNorm2d(4).eval(), randn(4, 3, 2)),
    Case("Embedding", lambda: nn.Embedding(6, 4), lambda: (torch.randint(6, (B, 5)),)),
    Case("Embedding-padding", lambda: nn.Embedding(6, 4, padding_idx=0), lambda: (torch.randint(6, (B,)),)),
    Case("Embedding-sparse", lambda: nn.Embedding(6, 4, sparse=True), lambda: (torch.randint(6, (B, 5)),)),
    Case("Embedding-max-norm", lambda: nn.Embedding(6, 4, max_norm=1.0), lambda: (torch.randint(6, (B, 5)),)),
    Case("EmbeddingBag", lambda: nn.EmbeddingBag(6, 4, mode="max"), lambda: (torch.randint(6, (B, 5)),)),
    Case("PReLU", lambda: nn.PReLU(4), randn(4, 2)),
    Case("Bilinear", lambda: nn.Bilinear(4, 3, 2), lambda: (torch.randn(B, 4), torch.randn(B, 3))),
    Case("Bilinear-keyword", lambda: nn.Bilinear(4, 3, 2), randn(4), lambda: {"input2": torch.randn(B, 3)}),
    Case("GRUCell", lambda: nn.GRUCell(4, 3), lambda: (torch.randn(B, 4), torch.randn(B, 3))),
    Case("RNNCell", lambda: nn.RNNCell(4, 4, bias=False), randn(4)),
    Case("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 4, 3, dilation=2), randn(4, 4)),
    Case("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), randn(4, 3, 2)),
    Case("ConvTranspose3d", lambda: nn.ConvTranspose3d(4, 4, 2, output_padding=0, bias=False), randn(4, 2, 2, 1)),
    Case("depthwise", lambda: nn.Conv1d(4, 4, 3, groups=4, padding="same"), randn(4, 6)),
    Case("weight-norm", lambda: weight_norm(nn.Linear(4, 3)), randn(4)),
    Case("parametrized", lambda: parametrizations.weight_norm(nn.Linear(4, 3)), randn(4)),
    Case("custom", Custom, custom_args, custom_kwargs),
    Case("in-place", InPlace, randn(4)),
    Case("control-flow", ControlFlow, randn(4)),
    Case("remembers", Remembers, randn(4)),
    Case("old-function", OldFunction, randn(4)),
    Case("two-names", Twice, randn(4)),
]
# vmap cannot do these; everything else must not fall back to the loop.
SLOW = {"in-place", "control-flow", "old-function", "Embedding-sparse", "Embedding-max-norm", "RNNCell"}


def build(case: Case, V: int = V) -> tuple[nn.Module, Any, Any, Tensor]:
    module, args, kwargs = case.make(), case.args(), case.kwargs()
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.ndim:
            buffer.uniform_(0.5, 1.5)
    with torch.no_grad():
        shape = module(*copies(args), **kwargs).shape
    return module, args, kwargs, torch.randn(V, *shape)


def copies(args: Any) -> Any:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args)


@pytest.fixture
def differentiable(loop: Any) -> Any:
    """The slow twin with every parameter differentiable while it runs."""

    def run(module: nn.Module, args: Any, kwargs: Any, g: Tensor) -> Any:
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
    def test_equals_the_loop(self, case: Case, differentiable: Any, same: Any) -> None:
        module, args, kwargs, g = build(case)
        rule = rule_of(module)
        assert type(rule) is LayerRule
        with torch.no_grad():
            ours = rule.per_example_grads(module, args, kwargs, g)
        same(ours, differentiable(module, args, kwargs, g))

    def test_as_many_vectors_as_examples(self, case: Case, differentiable: Any, same: Any) -> None:
        """Nested `vmap` mixes up the two axes for some layers, and shapes tell only if they differ."""
        module, args, kwargs, g = build(case, V=B)
        ours = rule_of(module).per_example_grads(module, args, kwargs, g)
        same(ours, differentiable(module, args, kwargs, g))

    def test_pieces_are_the_whole(self, case: Case, same: Any) -> None:
        module, args, kwargs, g = build(case)
        pieces = LayerRule()
        pieces.max_bytes = 1
        whole = LayerRule().per_example_grads(module, args, kwargs, g)
        same(pieces.per_example_grads(module, args, kwargs, g), whole)

    def test_vmap_is_used_where_it_can_be(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        module, args, kwargs, g = build(case)
        looped = []
        original = replay._Call.one_by_one
        monkeypatch.setattr(replay._Call, "one_by_one", lambda *a: looped.append(1) or original(*a))
        LayerRule().per_example_grads(module, args, kwargs, g)
        assert bool(looped) == (case.name in SLOW)

    def test_module_is_left_as_found(self, case: Case) -> None:
        module, args, kwargs, g = build(case)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        if isinstance(module, Remembers):
            del module.last  # must not be there afterwards either

        def everything() -> list[Any]:
            tensors = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters()), g]
            tensors += [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            flags = [p.requires_grad for p in module.parameters()] + [m.training for m in module.modules()]
            attributes = [v for k, v in vars(module).items() if not k.startswith("_")]
            identity = [id(t) for t in tensors] + [id(a) for a in attributes]
            return [
                flags,
                identity,
                [t._version for t in tensors],
                [t.tolist() for t in tensors],
                torch.get_rng_state(),
            ]

        before = everything()
        LayerRule().per_example_grads(module, args, kwargs, g)
        after = everything()
        assert torch.equal(before.pop(), after.pop())
        assert before == after

    def test_pattern_is_one_row(self, case: Case) -> None:
        module = case.make()
        for name, pattern in LayerRule().patterns(module).items():
            axes = pattern.split("->")[0].split()
            assert len(axes) == getattr(module, name).ndim
            assert pattern.split("->")[1].split()[0] == "1"


def test_patterns_name_every_direct_parameter() -> None:
    expected = {
        "scale": "-> 1 1",
        "token": "d0 d1 -> 1 (d0 d1)",
        "frozen": "d0 -> 1 (d0)",
        "unused": "d0 d1 -> 1 (d0 d1)",
    }
    assert LayerRule().patterns(Custom()) == expected


def test_unused_parameters_have_gradient_zero() -> None:
    module, args, kwargs, g = build(CASES[-6])
    assert isinstance(module, Custom)
    assert not LayerRule().per_example_grads(module, args, kwargs, g)["unused"].any()


def test_no_parameters_and_no_dependence() -> None:
    assert LayerRule().per_example_grads(nn.ReLU(), (torch.randn(B, 2),), {}, torch.randn(V, B, 2)) == {}

    class Ignores(ControlFlow):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    J = LayerRule().per_example_grads(Ignores(), (torch.randn(B, 4),), {}, torch.randn(V, B, 4))
    assert J["weight"].shape == (V, B, 4)
    assert not J["weight"].any()


def test_inputs_that_all_examples_share(same: Any) -> None:
    """A table of positions, called with one example's worth of positions: its output was expanded."""
    module, g = nn.Embedding(6, 4), torch.randn(V, B, 5, 4)
    shared = LayerRule().per_example_grads(module, (torch.arange(5)[None],), {}, g)
    same(shared, LayerRule().per_example_grads(module, (torch.arange(5).expand(B, 5),), {}, g))


def test_half_precision_is_computed_in_float32(same: Any) -> None:
    module, x, g = nn.LayerNorm(4), torch.randn(B, 4).bfloat16(), torch.randn(V, B, 4).bfloat16()
    module.bfloat16()
    halves = LayerRule().per_example_grads(module, (x,), {}, g)
    with torch.autocast("cpu"):
        same(LayerRule().per_example_grads(module, (x,), {}, g), halves)
    module.float()
    same(halves, LayerRule().per_example_grads(module, (x.float(),), {}, g.float()), 1e-6)


def test_children_keep_their_own_use_of_a_shared_parameter(same: Any) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(4, 4, bias=False)
            self.weight = self.child.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x) @ self.weight

    module, x, g = Parent(), torch.randn(B, 4), torch.randn(V, B, 4)
    own = torch.einsum("bi,vbo->vbio", module.child(x).detach(), g)  # of the second factor alone
    same(LayerRule().per_example_grads(module, (x,), {}, g), {"weight": own})


def test_memory_is_bounded() -> None:
    module, x, g = nn.LayerNorm(1000), torch.randn(50, 1000), torch.randn(4, 50, 1000)
    call = replay._Call(module, (x,), {}, 50)
    assert call.chunk_sizes(g, 2**40) == (4, 50)
    vectors, examples = call.chunk_sizes(g, 2**20)
    assert vectors == 4
    assert 1 < examples < 50
    assert call.chunk_sizes(g, 1) == (1, 1)


class TestRefusals:
    def check(self, module: nn.Module, *args: Any, match: str, error: type[Exception] = UnsupportedError) -> None:
        before = torch.get_rng_state()
        with pytest.raises(error, match=match):
            LayerRule().per_example_grads(module, args, {}, torch.randn(V, B, 4))
        torch.set_rng_state(before)

    def test_batch_norm_in_training_mode(self) -> None:
        x = torch.randn(B, 4)
        self.check(nn.BatchNorm1d(4), x, match=r"BatchNorm1d in training mode.*statistics of the batch.*eval\(\)")
        inner = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(4)))
        self.check(inner, x, match=r"BatchNorm1d \('norm' of Sequential\) in training mode")
        untracked = nn.BatchNorm1d(4, track_running_stats=False).eval()
        self.check(untracked, x, match="BatchNorm1d with track_running_stats=False normalizes")

    def test_random_numbers(self) -> None:
        class Noisy(ControlFlow):
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.dropout(x * self.weight)

        state = torch.get_rng_state()
        with pytest.raises(UnsupportedError, match=r"Noisy draws random numbers.*model.eval\(\)"):
            LayerRule().per_example_grads(Noisy(), (torch.ones(B, 4),), {}, torch.ones(V, B, 4))
        assert state.shape == torch.get_rng_state().shape

    def test_several_outputs(self) -> None:
        self.check(nn.LSTMCell(2, 4), torch.randn(B, 2), match="LSTMCell returned a tuple, expected one tensor.*Wrap")

    def test_output_that_does_not_fit(self) -> None:
        message = r"PReLU, called with one example, returned shape \(1, 5\).*has shape \(4,\).*dimension 0"
        self.check(nn.PReLU(), torch.randn(B, 5), match=message, error=ValueError)


def test_random_numbers_are_put_back() -> None:
    class Noisy(ControlFlow):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * torch.rand(4)

    module, x, g = Noisy(), torch.ones(B, 4), torch.ones(V, B, 4)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match="Noisy draws random numbers"):
        LayerRule().per_example_grads(module, (x,), {}, g)
    assert torch.equal(before, torch.get_rng_state())


def test_errors_of_the_module_are_the_users(loop: Any) -> None:
    class Broken(ControlFlow):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("what the user wrote")

    with pytest.raises(KeyError, match="what the user wrote"):
        LayerRule().per_example_grads(Broken(), (torch.ones(B, 4),), {}, torch.ones(V, B, 4))
