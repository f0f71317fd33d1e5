"""The form in which a tensor has the numbers of an output, and that form of another output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from curvlinops_plus.risk.output_forms import form_of, in_form
from test.helpers import normal

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda o: o,
    "rows": lambda o: o.view(-1, 3),
    "all in one": lambda o: o.reshape(-1),
    "two axes": lambda o: o.flatten(1),
    "unflattened": lambda o: o.unflatten(1, (5, 1)).squeeze(2),
    "all of a slice": lambda o: o[:, :, 0:3],
    "one chunk": lambda o: o.chunk(1, 2)[0],
    "one of an axis": lambda o: o[:, :, :, None].unbind(3)[0],
    "copied": lambda o: o.clone().contiguous(),
    "transposed": lambda o: o.transpose(-1, 1),
    "mT": lambda o: o.mT,
    "moved": lambda o: o.movedim(-1, 1),
    "permuted, in rows": lambda o: o.permute(0, -1, -2).reshape(-1, 5),
    "there and back": lambda o: o.mT.flatten(1).unflatten(1, (3, 5)).mT,
    "rounded": lambda o: o.half().float(),
    "an axis in front of the others": lambda o: o[:, None].transpose(1, 3),
}
NO_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda o: o + 0,
    "a part": lambda o: o[:, :4],
    "some examples": lambda o: o[:2],
    "backwards": lambda o: o.flip(1),
    "other axis first": lambda o: o.transpose(0, 1),
    "examples inside": lambda o: o.view(2, 2, 5, 3).transpose(0, 1),
    "an axis before the examples": lambda o: o[None],
    "repeated": lambda o: o.expand(2, 4, 5, 3)[0],
    "without graph": lambda o: o.detach(),
    "another": lambda o: torch.ones_like(o).requires_grad_(),
}


def output(n: int = 4) -> Tensor:
    return 2 * normal(4, 5, 3).requires_grad_()[:n]


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    """The same bits, of the output itself and of one for other examples."""
    whole = output()
    form = form_of(FORMS[name](whole), whole, 4)
    assert form is not None
    assert (form == ()) == (name == "as it is")
    for o in (whole, output(2)):
        assert torch.equal(in_form(o, form), FORMS[name](o))
    (one,) = torch.autograd.grad(in_form(whole, form).square().sum(), whole, retain_graph=True)
    (two,) = torch.autograd.grad(FORMS[name](whole).square().sum(), whole)
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", NO_FORMS)
def test_what_is_no_form(name: str) -> None:
    o = output()
    assert form_of(NO_FORMS[name](o), o, 4) is None


def test_outputs_of_one_node_are_told_apart() -> None:
    """Whose graph is the same."""
    one, two = output().split(2)
    assert form_of(two.mT, one, 2) is None
    assert form_of(two, one, 2) is None
    assert form_of(two.mT, two, 2) is not None
    variance, mean = torch.var_mean(output(), 2)
    assert form_of(mean.view(20), variance, 4) is None
    assert form_of(mean.view(20), mean, 4) is not None


def test_as_many_classes_as_examples() -> None:
    """The transposed output has the examples on another axis."""
    o = 2 * normal(4, 4).requires_grad_()
    assert form_of(o.T, o, 4) is None


def test_outputs_that_are_selected_twice() -> None:
    """What makes the same of one tensor gives the same numbers; parts of it are others."""
    o = output()
    for name, make in FORMS.items():
        form = form_of(make(o), make(o), 4)
        assert (form == ()) or name == "as it is"
    assert form_of(o.mT, o.flatten(1), 4) is None
    assert form_of(o[:, 0], o[:, 1], 4) is None
    assert form_of(o[:, :1].squeeze(1), o[:, 1:2].squeeze(1), 4) is None
    assert form_of(o.mT, output().mT, 4) is None
    leaf = normal(4, 5).requires_grad_()
    assert form_of(leaf.clone(), leaf, 4) is None
    assert form_of(leaf.detach().T, leaf.detach(), 4) is None
    assert form_of(leaf.view(20), leaf, 4) is None
