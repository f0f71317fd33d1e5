"""What rules of layers refuse, and in which words: a line for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import (
    AffineRule,
    ConvRule,
    LayerRule,
    LinearRule,
    register_rule,
    rule_of,
)
from curvlinops_plus.layer.embedding import EmbeddingBagRule, EmbeddingRule
from curvlinops_plus.layer.rule_check import check_rule
from test.helpers import Refusal, refusals
from test.layer.test_conv import MyLinear, MyLinearRule

EMBEDDING = EmbeddingRule()
BAG = EmbeddingBagRule()
BAGS = nn.EmbeddingBag(7, 3)
LINEAR = nn.Linear(5, 2)
CONVOLUTIONS = nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3)
X = torch.zeros(4, 5)


class Strict(LinearRule):
    def check(self, module: nn.Module) -> None:
        raise UnsupportedError("not this one")


class Misspelled(AffineRule):
    def patterns(self, module: nn.Module) -> dict[str, str]:
        return {"wieght": "o i -> o i"}


def misspelled() -> None:
    """Of a class of its own, since rules are registered for good."""
    kind = type("Own", (nn.Linear,), {"forward": lambda self, x: 2 * x})
    register_rule(kind)(Misspelled)
    rule_of(kind(2, 2))


def mistake(rule: type[AffineRule], **methods: Any) -> None:
    wrong = type("Wrong", (rule,), methods)()
    wrong.per_example_grads(MyLinear(), (torch.ones(3, 3),), {}, torch.ones(2, 3, 2))


REFUSED: list[Refusal] = [
    # inputs
    (lambda: EMBEDDING.inputs(nn.Embedding(7, 3), torch.tensor(3)),
     ValueError, r"Embedding\(7, 3\) got an input of shape \(\), expected \[exam.*x\[None\]"),
    (lambda: BAG.input_of(BAGS, (torch.ones(9).long(),), {}),
     ValueError, r"EmbeddingBag\(7, 3, mode='mean'\) got an input of shape \(9,\) without `off"),
    (lambda: BAG.input_of(BAGS, ([1, 2],), {}),
     ValueError, "EmbeddingBagRule expects a tensor as first input of the layer, got list"),
    (lambda: EMBEDDING.check(nn.Embedding(5, 3, max_norm=1.0)),
     UnsupportedError, "in place.*Set max_norm=None"),
    (lambda: BAG.check(nn.EmbeddingBag(5, 3, max_norm=1.0)),
     UnsupportedError, "in place.*Set max_norm=None"),
    (lambda: LinearRule().inputs(nn.Linear(3, 2), torch.rand(3)),
     ValueError, r"shape \(3,\), expected \[examples, ..., 3\].*x\[None\]"),
    *[(lambda conv=conv, method=method: getattr(rule_of(conv), method)(conv, torch.rand(2, 5, 5)),
       ValueError, r"2d got an input of shape \(2, 5, 5\), expected 4 dim.*x\[None\]")
      for method in ("inputs", "input_gram", "mean_inputs") for conv in CONVOLUTIONS],
    (lambda: MyLinearRule().per_example_grads(MyLinear(), (1.0,), {}, torch.ones(2, 3, 2)),
     ValueError, r"expects a tensor as first input of the layer, got float.*input_of"),
    # what rules must define
    (lambda: AffineRule().patterns(MyLinear()),
     NotImplementedError, r"AffineRule must define patterns\(module\)"),
    (lambda: mistake(AffineRule),
     NotImplementedError, r"Wrong must define inputs\(module, x\), \[B, \*in\] -> \[B, S, i\]"),
    (lambda: mistake(AffineRule, inputs=MyLinearRule.inputs),
     NotImplementedError, r"Wrong must define grads\(module, g\)"),
    (lambda: mistake(MyLinearRule, inputs=lambda rule, m, x: x),
     ValueError, r"inputs are \[3, 3\], expected \[B, S, \*b, i\]"),
    (lambda: mistake(MyLinearRule, grads=lambda rule, m, g: g),
     ValueError, r"gradients \[2, 3, 2\], expected \[V, B, S, \*b, o\]"),
    (lambda: mistake(MyLinearRule, inputs=lambda rule, m, x: torch.ones(3, 1, 4)), ValueError,
     r"inputs\(...\) has 4 columns, but the parameters of patterns\(...\).*have 3"),
    (lambda: mistake(MyLinearRule, inputs=lambda rule, m, x: torch.ones(3, 2, 3)),
     ValueError, "with the same examples, positions and matrices"),
    (misspelled, ValueError, r"Misspelled.patterns names \['wieght'\], but Own has.*'weight'"),
    (lambda: register_rule(), TypeError,
     r"expects module types or their full names, got nothing. Write `@register_rule\(MyLayer\)`"),
    (lambda: register_rule(nn.PReLU()),
     TypeError, "expects module types or their full names, got .*PReLU"),
    (lambda: register_rule(LayerRule),
     TypeError, "expects module types or their full names, got .*LayerRule"),
    (lambda: register_rule(nn.PReLU)(nn.Identity),
     TypeError, "decorates a subclass of LayerRule or AffineRule, got .*Identity"),
    # check_rule
    (lambda: check_rule(LINEAR, X, rule=ConvRule),
     UnsupportedError, "ConvRule refuses Linear: this Linear has another"),
    (lambda: check_rule(LINEAR, X, rule=Strict), UnsupportedError, "not this one"),
    *[(lambda args=args: check_rule(LINEAR, *args),
       ValueError, "needs a call of the layer with two examples at least")
      for args in ((), (3.0,), (torch.ones(1, 5),), (torch.ones(()),))],
    (lambda: check_rule(nn.ReLU(), X), ValueError, "ReLU holds no parameters of its own"),
]  # fmt: skip
test_refusals = refusals(REFUSED)
