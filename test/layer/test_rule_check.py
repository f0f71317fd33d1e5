"""`check_rule` passes right rules, catches every kind of wrong one, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from curvlinops_plus.errors import VerificationError
from curvlinops_plus.layer import AffineRule, LayerRule, SparseRows, register_rule
from curvlinops_plus.layer.rule_check import check_rule

B, T, i, o = 4, 3, 5, 2


class Kernel(nn.Module):
    """y = scale · x @ kernel + bias, with positions between examples and features."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias, self.scale = (
            nn.Parameter(torch.randn(i, o)),
            nn.Parameter(torch.randn(o)),
            2.0,
        )

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
    def per_example_grads(
        self, module: nn.Module, args: Any, kwargs: Any, g: Any
    ) -> dict[str, Tensor]:
        x = args[0] if args else kwargs["x"]
        return {"scale": (g * x).sum(2)}


def bags() -> Tensor:
    x = torch.randint(7, (B, T, 2))
    x[0, 0] = 0
    return x


RIGHT: dict[Any, tuple[Any, Any, int]] = {  # rule: module, input, number of checks
    KernelRule: (Kernel, lambda: torch.randn(B, T, i), 10),
    HeadsRule: (Heads, lambda: torch.randn(B, T, 3 * i), 10),
    BagsRule: (Bags, bags, 9),
    ScaleRule: (Scale, lambda: torch.randn(B, T, i), 4),
}


@pytest.mark.parametrize("rule", RIGHT)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_right_rules_pass(rule: Any, default: torch.dtype) -> None:
    """Also in the default precision of PyTorch: the copy is in double precision."""
    torch.set_default_dtype(default)
    make, x, number = RIGHT[rule]
    module = make()
    given = [
        check_rule(module, x(), rule=rule),
        check_rule(module, x(), rule=rule(), num_vectors=3, seed=1),
    ]
    register_rule(make)(rule)
    for table in (*given, check_rule(module, x())):
        assert (table.module, table.rule, len(table.rows)) == (make.__name__, rule.__name__, number)
        assert bool(table.note) == (rule is ScaleRule)
        assert all(error <= 1e-12 for _, error in table.rows)
        lines = str(table).splitlines()
        assert (lines[0], lines[-1]) == (
            f"{rule.__name__} of {make.__name__}",
            f"all {number} checks passed",
        )


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), lambda: (torch.randn(B, 2, 5, 4),)),
        (lambda: nn.BatchNorm1d(i).eval(), lambda: (torch.randn(B, i),)),
        (lambda: nn.LSTM(i, o), lambda: (torch.randn(T, B, i),)),
        (
            lambda: nn.GRU(i, o, batch_first=True, num_layers=B),
            lambda: (torch.randn(B, T, i), torch.randn(B, B, o)),
        ),
        (
            lambda: nn.LSTMCell(i, o),
            lambda: (torch.randn(B, i), (torch.randn(B, o), torch.randn(B, o))),
        ),
        (lambda: nn.MultiheadAttention(4, 2), lambda: (torch.randn(T, B, 4),) * 3),
        (lambda: weight_norm(nn.Linear(i, o)), lambda: (torch.randn(B, i),)),
        (lambda: parametrizations.weight_norm(nn.Linear(i, o)), lambda: (torch.randn(B, i),)),
        (
            lambda: nn.Embedding(9, o, scale_grad_by_freq=True, padding_idx=1),
            lambda: (torch.randint(3, (B, T)),),
        ),
        (Scale, lambda: (torch.randn(B, T, i),)),
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
    attributes, rng = [dict(vars(m)) for m in module.modules()], torch.get_rng_state()
    assert len(check_rule(module, *args).rows) >= 4
    assert all(
        t.equal(c) and (t._version, t.requires_grad) == (v, flag) for t, c, v, flag in before
    )
    assert [dict(vars(m)) for m in module.modules()] == attributes
    assert torch.equal(rng, torch.get_rng_state())


def test_keywords_and_tensors_that_all_examples_share() -> None:
    assert (
        len(check_rule(Scale(), torch.randn(B, T, i), rule=ScaleRule, shift=torch.randn(T, i)).rows)
        == 4
    )
    assert (
        len(check_rule(Scale(), x=torch.randn(B, T, i), rule=ScaleRule).rows) == 4
    )  # there are only keywords


# -------------------------------------------------------------------------------------- wrong rules
def mixed(self: Any, module: Any, x: Tensor) -> Tensor:
    return x * len(x) / B  # right for a whole batch


def fast(name: str, change: Any) -> dict[str, Any]:
    return {name: lambda self, *args: change(getattr(AffineRule, name)(self, *args))}


def worse(k: int) -> Any:
    return lambda found: tuple(t * 1.001 if n == k else t for n, t in enumerate(found))


def grads(change: Any) -> dict[str, Any]:
    """Gradients of a scale that are changed, in a function of these and of the vectors."""
    right = ScaleRule().per_example_grads
    return {
        "per_example_grads": lambda s, m, a, k, g: {"scale": change(right(m, a, k, g)["scale"], g)}
    }


PLAIN = {"per_example_grads": lambda s, m, a, k, g: KernelRule().per_example_grads(m, a, k, g)}
WRONG: dict[str, Any] = {
    "forgotten factor": (
        KernelRule,
        {"grads": lambda s, m, g: g},
        r"'gradients': off by 5.*e-01.*This is 'kernel'",
    ),
    "order of positions": (
        KernelRule,
        {"inputs": lambda s, m, x: x.flip(1)},
        "'gradients': off by .*Is it summed ove",
    ),
    "transposed": (
        KernelRule,
        {"patterns": lambda s, m: {"kernel": "i o -> i o", "bias": "o -> o 1"}},
        "'patterns': Expected parameters of one layout to have the same rows",
    ),
    "no bias": (
        KernelRule,
        {"patterns": lambda s, m: {"kernel": "i o -> o i"}},
        "'patterns': Expected one pattern .*",
    ),
    "examples": (
        KernelRule,
        {"inputs": mixed},
        "'gradients, one vector and fewer examples': off by",
    ),
    "input_gram": (
        KernelRule,
        fast("input_gram", worse(0)),
        r"'fast path input_gram': off by 1.0e-03.*Σ a aᵀ \[\*b",
    ),
    "its sum": (
        KernelRule,
        fast("input_gram", worse(1)),
        "'fast path input_gram': off by 1.0e-03.*Σ a, the second",
    ),
    "its count": (
        KernelRule,
        fast("input_gram", worse(2)),
        "'fast path input_gram': off by 1.0e-03.*number of rows",
    ),
    "mean_inputs": (
        KernelRule,
        fast("mean_inputs", lambda t: t * 3),
        "'fast path mean_inputs': off by 2.0e.00",
    ),
    "shape": (
        KernelRule,
        fast("mean_inputs", lambda t: t[None]),
        r"mean_inputs': shape \[1, 4, 5\], expected \[4, 5\]",
    ),
    "grad_gram": (
        KernelRule,
        fast("grad_gram", lambda t: t * torch.nan),
        "'fast path grad_gram': off by nan",
    ),
    "own gradients hide rows": (
        KernelRule,
        {**PLAIN, "grads": lambda s, m, g: g},
        "'rows': off by .*sum of produ",
    ),
    "own gradients hide mixed rows": (
        KernelRule,
        {**PLAIN, "inputs": mixed},
        "'rows of fewer examples': off by",
    ),
    "batched": (
        HeadsRule,
        {"grads": lambda s, m, g: g.unflatten(-1, (3, o)).flip(3)},
        "of Heads.*'gradi",
    ),
    "sparse kept": (
        BagsRule,
        {"inputs": lambda s, m, x: SparseRows(x, (x > 0) / 2.0, 7, (x > 3).any(-1), torch.float64)},
        "'gradients': off by",
    ),
    "sparse undeclared": (
        BagsRule,
        {"sparse": False},
        r"'rows': inputs\(...\) returned a SparseRows, with sparse=Fals",
    ),
    "sparse diagonal": (
        BagsRule,
        fast("input_gram", worse(0)),
        r"'fast path input_gram'.*of sparse rows its diagonal",
    ),
    "no sum": (
        ScaleRule,
        grads(lambda J, g: J[:, :, None] + 0 * g),
        r"'gradients': shape \[2, 4, 3, 5\], expected",
    ),
    "sum over examples": (
        ScaleRule,
        grads(lambda J, g: J + 1),
        "'gradients': off by .*over nothing else",
    ),
    "other names": (
        ScaleRule,
        {"per_example_grads": lambda s, m, a, k, g: {"weight": g.sum(2)}},
        r"'gradients': gradients of \['weight'\], expected those of \['scale'\]",
    ),
    "one vector": (
        ScaleRule,
        grads(lambda J, g: J * (1 + (len(g) == 1))),
        "'gradients, one vector and fewer examples'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found(name: str) -> None:
    base, methods, words = WRONG[name]
    make, x, _ = RIGHT[base]
    with pytest.raises(VerificationError, match=words) as error:
        check_rule(make(), x(), rule=type("Wrong", (base,), methods))
    assert str(error.value).startswith(f"Wrong of {make.__name__}, check ")


class Mixes(Scale):
    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        return super().forward(x - x.mean(0))


class Counts(Scale):
    calls = 0

    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Noisy(Scale):
    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


class Turned(Scale):
    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        return super().forward(x).transpose(0, 1)


class Axes(LayerRule):
    def axes(self, module: nn.Module, axis: int, leaves: Any, inputs: bool) -> list[int]:
        return [0 if inputs else 1]


@pytest.mark.parametrize("kind", [Mixes, Counts, Noisy])
def test_modules_that_mix_examples_or_remember(kind: Any) -> None:
    words = (
        f"LayerRule of {kind.__name__}, check 'examples are independent': off by .*depends on "
        "other examples"
    )
    with pytest.raises(VerificationError, match=words):
        check_rule(kind(), torch.randn(B, T, i))


def test_examples_on_another_axis() -> None:
    with pytest.raises(
        VerificationError, match=r"outputs of shapes \[\[3, 4, 5\]\], .* on axis 0.*override `axes`"
    ):
        check_rule(Turned(), torch.randn(B, T, i))
    assert len(check_rule(Turned(), torch.randn(B, T, i), rule=Axes).rows) == 4
