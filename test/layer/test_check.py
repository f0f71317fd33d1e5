"""`check_rule` passes right rules, catches every kind of wrong one, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from curvlinops_plus.errors import UnsupportedError, VerificationError
from curvlinops_plus.layer import AffineRule, ConvRule, LayerRule, LinearRule, SparseRows, register_rule
from curvlinops_plus.layer.rule_check import RuleCheck, check_rule

B, T, i, o = 4, 3, 5, 2


# ------------------------------------------------------------------------------------------------------ right rules
class Kernel(nn.Module):
    """y = scale · x @ kernel + bias, with positions between examples and features."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(i, o)), nn.Parameter(torch.randn(o))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.kernel + self.bias)


class KernelRule(AffineRule):
    def patterns(self, module: nn.Module) -> dict[str, str]:
        return {"kernel": "i o -> o i", "bias": "o -> o 1"}

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor | SparseRows:
        return x

    def grads(self, module: Any, g: Tensor) -> Tensor:
        return module.scale * g


class Heads(nn.Module):
    """Some matrices, each for its part of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, o, i))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 3 i] -> [B, T, 3 o]
        return torch.einsum("btki,koi->btko", x.unflatten(-1, (3, i)), self.weight).flatten(2)


class HeadsRule(AffineRule):
    def patterns(self, module: nn.Module) -> dict[str, str]:
        return {"weight": "k o i -> k o i"}

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor | SparseRows:
        return x.unflatten(-1, (3, i))

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:
        return g.unflatten(-1, (3, o))


class Bags(nn.Module):
    """The mean of some rows of a table; index 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, o))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, L] -> [B, T, o]
        return (self.table[x] * (x > 0)[..., None]).sum(2) / 2


class BagsRule(AffineRule):
    sparse = True

    def patterns(self, module: nn.Module) -> dict[str, str]:
        return {"table": "i o -> o i"}

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor | SparseRows:
        return SparseRows(x, (x > 0) / 2.0, 7, (x > 0).any(-1), torch.float64)

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:
        return g


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(i))

    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:  # [B, T, i]
        return self.scale * x + shift


class ScaleRule(LayerRule):
    def per_example_grads(self, module: nn.Module, args: Any, kwargs: Any, g: Any) -> dict[str, Tensor]:
        x = args[0] if args else kwargs["x"]
        return {"scale": (g * x).sum(2)}


def bags() -> Tensor:
    x = torch.randint(7, (B, T, 2))
    x[0, 0] = 0
    return x


RIGHT: dict[str, Any] = {
    "kernel": (Kernel, KernelRule, lambda: torch.randn(B, T, i)),
    "heads": (Heads, HeadsRule, lambda: torch.randn(B, T, 3 * i)),
    "bags": (Bags, BagsRule, bags),
    "scale": (Scale, ScaleRule, lambda: torch.randn(B, T, i)),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_right_rules_pass(name: str, default: torch.dtype) -> None:
    """Also in the default precision of PyTorch: the copy is in double precision."""
    torch.set_default_dtype(default)
    make, rule, x = RIGHT[name]
    module, x = make(), x()
    by_class, by_instance = check_rule(module, x, rule=rule), check_rule(module, x, rule=rule())
    register_rule(make)(rule)
    table = check_rule(module, x, num_vectors=3, seed=1)
    assert isinstance(table, RuleCheck)
    assert [name for name, _ in table.rows] == [name for name, _ in by_class.rows] == [n for n, _ in by_instance.rows]
    assert (table.module, table.rule) == (make.__name__, rule.__name__)
    assert bool(table.note) == (name == "scale")
    assert all(error <= 1e-12 for _, error in table.rows)
    assert len(table.rows) == {"scale": 5, "bags": 12, "heads": 12}.get(name, 14)


def test_the_table() -> None:
    lines = str(check_rule(nn.Linear(i, o), torch.randn(B, i))).splitlines()
    assert lines[0] == "LinearRule of Linear"
    assert lines[-1] == "all 14 checks passed"
    assert len(lines) == 16
    assert len({len(line) for line in lines[1:-1]}) == 1  # columns
    other = str(
        check_rule(nn.Tanh.__base__ and nn.Bilinear(2, 3, 4), torch.randn(B, 2), torch.randn(B, 3), rule=LayerRule)
    )
    assert other.splitlines()[1] == "no Kronecker factors: LayerRule is no AffineRule"


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), lambda: (torch.randn(B, 2, 5, 4),)),
        (lambda: nn.Linear(i, o, bias=False), lambda: (torch.randn(B, i),)),
        (lambda: nn.BatchNorm1d(i).eval(), lambda: (torch.randn(B, i),)),
        (lambda: nn.LSTM(i, o), lambda: (torch.randn(T, B, i),)),
        (lambda: nn.GRU(i, o, batch_first=True, num_layers=B), lambda: (torch.randn(B, T, i), torch.randn(B, B, o))),
        (lambda: nn.LSTMCell(i, o), lambda: (torch.randn(B, i), (torch.randn(B, o), torch.randn(B, o)))),
        (lambda: nn.MultiheadAttention(4, 2), lambda: (torch.randn(T, B, 4),) * 3),
        (lambda: weight_norm(nn.Linear(i, o)), lambda: (torch.randn(B, i),)),
        (lambda: parametrizations.weight_norm(nn.Linear(i, o)), lambda: (torch.randn(B, i),)),
        (lambda: nn.Embedding(9, o, scale_grad_by_freq=True, padding_idx=1), lambda: (torch.randint(3, (B, T)),)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_known_layers_pass_and_stay_as_they_are(make: Any, inputs: Any) -> None:
    module, args = make().float(), inputs()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    tensors = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    tensors += [t for t in args if isinstance(t, Tensor)]
    before = [(t, t.clone(), t._version, t.requires_grad) for t in tensors]
    attributes = [dict(vars(m)) for m in module.modules()]
    rng = torch.get_rng_state()
    table = check_rule(module, *args)
    assert len(table.rows) >= 5
    assert all(t.equal(c) and (t._version, t.requires_grad) == (v, flag) for t, c, v, flag in before)
    assert [dict(vars(m)) for m in module.modules()] == attributes
    assert torch.equal(rng, torch.get_rng_state())


def test_keywords_and_tensors_that_all_examples_share() -> None:
    table = check_rule(Scale(), torch.randn(B, T, i), rule=ScaleRule, shift=torch.randn(T, i))
    assert len(table.rows) == 5
    assert len(check_rule(Scale(), x=torch.randn(B, T, i), rule=ScaleRule).rows) == 5  # there are only keywords


def test_a_child_s_use_of_a_parameter_is_the_child_s() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(i, i, bias=False)
            self.weight = self.child.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x) @ self.weight

    assert len(check_rule(Parent(), torch.randn(B, i)).rows) == 5


# ------------------------------------------------------------------------------------------------------ wrong rules
def changed(base: type[LayerRule], **methods: Any) -> type[LayerRule]:
    """A rule of which something is wrong."""
    return type(f"Wrong{base.__name__}", (base,), methods)


def order(self: Any, module: Any, x: Tensor) -> Tensor:
    return x.flip(1)


def mixed(self: Any, module: Any, x: Tensor) -> Tensor:
    return x * len(x) / B  # right for a whole batch


def fast(name: str, change: Any) -> dict[str, Any]:
    return {name: lambda self, *args: change(getattr(AffineRule, name)(self, *args))}


def worse(k: int) -> Any:
    return lambda found: tuple(t * 1.001 if n == k else t for n, t in enumerate(found))


WRONG: dict[str, Any] = {
    "forgotten factor": (KernelRule, {"grads": lambda s, m, g: g}, r"'gradients': off by 5.*e-01.*This is 'kernel'"),
    "order of positions": (KernelRule, {"inputs": order}, r"'gradients': off by .*Is it summed over all positions"),
    "transposed": (
        KernelRule,
        {"patterns": lambda s, m: {"kernel": "i o -> i o", "bias": "o -> o 1"}},
        "'patterns': Expected parameters of one layout to have the same rows",
    ),
    "no pattern for the bias": (
        KernelRule,
        {"patterns": lambda s, m: {"kernel": "i o -> o i"}},
        r"'patterns': Expected one pattern .* \['kernel'\] and shapes of \['kernel', 'bias'\]",
    ),
    "examples": (KernelRule, {"inputs": mixed}, "'gradients, one vector and fewer examples': off by"),
    "input_gram": (KernelRule, fast("input_gram", worse(0)), r"'fast path input_gram': off by 1.0e-03.*Σ a aᵀ \[\*b"),
    "its sum": (KernelRule, fast("input_gram", worse(1)), "'fast path input_gram': off by 1.0e-03.*Σ a, the second"),
    "its count": (KernelRule, fast("input_gram", worse(2)), "'fast path input_gram': off by 1.0e-03.*number of rows"),
    "stacked_inputs": (KernelRule, fast("stacked_inputs", lambda t: t.flip(0)), "'fast path stacked_inputs': off by"),
    "stacked_grads": (KernelRule, fast("stacked_grads", lambda t: t * 2), "'fast path stacked_grads': off by 1.0e.00"),
    "mean_inputs": (KernelRule, fast("mean_inputs", lambda t: t * 3), "'fast path mean_inputs': off by 2.0e.00"),
    "shape of a mean": (
        KernelRule,
        fast("mean_inputs", lambda t: t[None]),
        r"'fast path mean_inputs': shape \[1, 4, 5\], expected \[4, 5\]. This is the mean",
    ),
    "grad_gram": (KernelRule, fast("grad_gram", lambda t: t * torch.nan), "'fast path grad_gram': off by nan"),
    "sum_grads": (KernelRule, fast("sum_grads", lambda t: t.flip(1)), r"'fast path sum_grads'.*sum over positions"),
    "own gradients": (
        KernelRule,
        {
            "per_example_grads": lambda s, m, a, k, g: {
                n: -J for n, J in KernelRule().per_example_grads(m, a, k, g).items()
            }
        },
        "'gradients': off by 2.0e.00",
    ),
    "own gradients hide rows": (
        KernelRule,
        {
            "per_example_grads": lambda s, m, a, k, g: KernelRule().per_example_grads(m, a, k, g),
            "grads": lambda s, m, g: g,
        },
        "'rows': off by .*sum of outer products of rows",
    ),
    "own gradients hide mixed rows": (
        KernelRule,
        {
            "per_example_grads": lambda s, m, a, k, g: KernelRule().per_example_grads(m, a, k, g),
            "inputs": mixed,
        },
        "'rows of fewer examples': off by",
    ),
    "batched": (
        HeadsRule,
        {"grads": lambda s, m, g: g.unflatten(-1, (3, o)).flip(3)},
        "WrongHeadsRule of Heads.*'gradi",
    ),
    "sparse kept": (
        BagsRule,
        {"inputs": lambda s, m, x: SparseRows(x, (x > 0) / 2.0, 7, (x > 3).any(-1), torch.float64)},
        "'gradients': off by",
    ),
    "sparse undeclared": (
        BagsRule,
        {"sparse": False},
        r"'rows': inputs\(...\) returned a SparseRows, with sparse=False",
    ),
    "sparse diagonal": (
        BagsRule,
        fast("input_gram", worse(0)),
        r"'fast path input_gram'.*of sparse rows its diagonal \[i\]",
    ),
    "no sum": (
        ScaleRule,
        {"per_example_grads": lambda s, m, a, k, g: {"scale": g * (a[0] if a else k["x"])}},
        r"'gradients': shape \[2, 4, 3, 5\], expected \[2, 4, 5\]. This is 'scale'",
    ),
    "sum over examples": (
        ScaleRule,
        {
            "per_example_grads": lambda s, m, a, k, g: {
                "scale": (g * a[0]).sum(2) + 0 * (g * a[0]).sum((1, 2))[:, None] + 1
            }
        },
        "'gradients': off by .*Is it summed over all positions, and over nothing else",
    ),
    "other names": (
        ScaleRule,
        {"per_example_grads": lambda s, m, a, k, g: {"weight": g.sum(2)}},
        r"'gradients': gradients of \['weight'\], expected those of \['scale'\]",
    ),
    "one vector": (
        ScaleRule,
        {
            "per_example_grads": lambda s, m, a, k, g: {
                "scale": (g * (a[0] if a else k["x"])).sum(2) * (1 + (len(g) == 1))
            }
        },
        "'gradients, one vector and fewer examples': off by",
    ),
    "vectors for examples": (
        ScaleRule,
        {
            "per_example_grads": lambda s, m, a, k, g: {
                "scale": (g * (a[0] if a else k["x"])).sum(2).transpose(0, 1 if len(g) == g.shape[1] else 0)
            }
        },
        "'gradients, as many vectors as examples': off by",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found(name: str) -> None:
    base, methods, words = WRONG[name]
    make, _, x = next(entry for entry in RIGHT.values() if entry[1] is base)
    with pytest.raises(VerificationError, match=words) as error:
        check_rule(make(), x(), rule=changed(base, **methods))
    assert str(error.value).startswith(f"Wrong{base.__name__} of {make.__name__}, check ")


def test_modules_that_mix_examples_or_remember() -> None:
    class Mixes(Scale):
        def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
            return super().forward(x - x.mean(0))

    class Counts(Scale):
        calls = 0

        def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    for kind in (Mixes, Counts):
        words = f"LayerRule of {kind.__name__}, check 'examples are independent': off by .*depends on the others of its"
        with pytest.raises(VerificationError, match=words):
            check_rule(kind(), torch.randn(B, T, i))


def test_examples_on_another_axis() -> None:
    class Turned(Scale):
        def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
            return super().forward(x).transpose(0, 1)

    words = r"4 examples gave outputs of shapes \[\[3, 4, 5\]\], expected .* on axis 0.*override `axes`"
    with pytest.raises(VerificationError, match=words):
        check_rule(Turned(), torch.randn(B, T, i))

    class Axes(LayerRule):
        def axes(self, module: nn.Module, axis: int, leaves: Any, inputs: bool) -> list[int]:
            return [0 if inputs else 1]

    assert len(check_rule(Turned(), torch.randn(B, T, i), rule=Axes).rows) == 5


class TestRefusals:
    def test_random_numbers(self) -> None:
        class Noisy(Scale):
            def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
                return nn.functional.dropout(super().forward(x), training=self.training)

        with pytest.raises(VerificationError, match=r"or on random numbers \(call `module.eval\(\)` first\)"):
            check_rule(Noisy(), torch.randn(B, T, i))
        assert len(check_rule(Noisy().eval(), torch.randn(B, T, i)).rows) == 5

    def test_modes_and_options(self) -> None:
        with pytest.raises(UnsupportedError, match="BatchNorm1d in training mode"):
            check_rule(nn.BatchNorm1d(i), torch.randn(B, i))
        with pytest.raises(UnsupportedError, match=r"Linear in training mode: spectral normalization"):
            check_rule(spectral_norm(nn.Linear(i, o)), torch.randn(B, i))
        with pytest.raises(UnsupportedError, match="ConvRule refuses Linear: this Linear has another `_conv_forward`"):
            check_rule(nn.Linear(i, o), torch.randn(B, i), rule=ConvRule)

        class Strict(LinearRule):
            def check(self, module: nn.Module) -> None:
                raise UnsupportedError("not this one")

        with pytest.raises(UnsupportedError, match="not this one"):
            check_rule(nn.Linear(i, o), torch.randn(B, i), rule=Strict)

    @pytest.mark.parametrize("args", [(), (3.0,), (torch.ones(1, i),), (torch.ones(()),)])
    def test_inputs(self, args: Any) -> None:
        with pytest.raises(ValueError, match=r"needs a call of the layer with two examples at least"):
            check_rule(nn.Linear(i, o), *args)

    def test_nothing_to_check(self) -> None:
        for module in (nn.ReLU(), nn.Sequential(nn.Linear(i, o))):
            with pytest.raises(ValueError, match=f"{type(module).__name__} holds no parameters of its own"):
                check_rule(module, torch.randn(B, i))
