"""The parameters of a risk as one vector, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus import GGN, EmpiricalRisk, KFACOptimizer
from curvlinops_plus.risk.parameters import example_axes
from test.helpers import normal

DATA = [(torch.ones(4, 3), torch.zeros(4, 2))]


def make(dtype: torch.dtype = torch.float32, **options) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
    return EmpiricalRisk(
        model, nn.MSELoss(), [(X.to(dtype), y.to(dtype)) for X, y in DATA], **options
    )


def test_the_vector_is_a_copy_in_the_order_of_operators() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    risk = EmpiricalRisk(model, nn.MSELoss(), DATA, [model[1].bias, model[0].weight])
    v = risk.vector()
    assert torch.equal(v, torch.cat([model[1].bias.detach(), model[0].weight.detach().flatten()]))
    assert not v.requires_grad
    assert v.data_ptr() != model[1].bias.data_ptr()
    assert GGN(risk).in_space.unflatten(v).keys() == risk.params.keys()
    single = EmpiricalRisk(model, nn.MSELoss(), DATA, [model[0].weight])
    single.vector().zero_()
    assert float(model[0].weight.detach().abs().sum()) > 0


@pytest.mark.parametrize(
    "kind", ["tensor", "numpy", "list", "tuple", "dict", "shuffled dict", "leaf"]
)
def test_assigning_what_was_taken(kind) -> None:
    risk = make()
    model, v = risk.model, torch.arange(14.0)
    tree = risk.space.unflatten(v)
    given = {
        "tensor": v,
        "numpy": v.double().numpy(),
        "list": list(tree.values()),
        "tuple": tuple(tree.values()),
        "dict": tree,
        "shuffled dict": dict(reversed(tree.items())),
        "leaf": v.clone().requires_grad_(),
    }[kind]
    held = dict(model.named_parameters())
    assert risk.assign(given) is None
    assert torch.equal(risk.vector(), v)
    assert all(
        held[key] is p and p.is_leaf and p.requires_grad for key, p in model.named_parameters()
    )
    assert torch.equal(model[0].bias.detach(), torch.tensor([6.0, 7.0]))
    twin = make()
    twin.model.load_state_dict(risk.space.unflatten(v))
    assert torch.equal(GGN(risk).to_dense(), GGN(twin).to_dense())


def test_assigning_to_half_precision() -> None:
    risk = make(torch.bfloat16)
    v = risk.vector()
    risk.assign(v)
    assert torch.equal(risk.vector(), v)
    assert {v.dtype, *[p.dtype for p in risk.model.parameters()]} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (torch.zeros(13), ValueError, r"Expected shape \[14\]"),
        (torch.zeros(14, 2), ValueError, r"expected a single vector \[14\], got 2 columns"),
        (torch.zeros(14, 1), ValueError, r"expected a single vector \[14\], got 1 columns"),
        (torch.zeros(14, dtype=torch.float64), TypeError, r"Expected the vector in torch.float32"),
        (
            {"0.weight": torch.zeros(2, 3)},
            ValueError,
            r"missing \['0.bias', '1.weight', '1.bias'\]",
        ),
        (
            [torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 2), torch.zeros(3)],
            ValueError,
            'Tensor "1.bias"',
        ),
        ("weights", TypeError, "got str"),
        (np.zeros(3), ValueError, r"Expected shape \[14\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(given, error, words) -> None:
    risk = make()
    before = risk.vector()
    with pytest.raises(error, match=words):
        risk.assign(given)
    assert torch.equal(risk.vector(), before)


def test_other_values_and_other_tensors_are_refused() -> None:
    risk = make()
    before = risk.vector()
    other = EmpiricalRisk(
        risk.model, nn.MSELoss(), DATA, {key: p + 1 for key, p in risk.params.items()}
    )
    assert torch.equal(other.vector(), before + 1)
    with pytest.raises(
        ValueError, match=r"`params` holds other values of \['0.weight', '0.bias', '1.weight'\]"
    ):
        other.assign(before)
    assert torch.equal(risk.vector(), before)
    risk.model[0].weight = nn.Parameter(torch.zeros(2, 3))
    for use in (risk.vector, lambda: risk.assign(before)):
        with pytest.raises(ValueError, match="other tensors in place of its parameters"):
            use()


def test_a_transposed_view_is_another_value() -> None:
    """It begins at the parameter's memory, and has the shape of a square one."""
    model = nn.Linear(2, 2)
    data = [(torch.rand(3, 2), torch.rand(3, 2))]
    turned = EmpiricalRisk(model, nn.MSELoss(), data, {"weight": model.weight.T})
    assert torch.equal(turned.params["weight"], model.weight.T)


def test_another_module_around_one_with_parameters_is_noticed() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.rand(3, 2), torch.rand(3, 2))])
    model[0] = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"parameters or modules \['0'\]"):
        risk.vector()


def test_axes_of_examples_are_read_from_classes_and_instances() -> None:
    class TimeFirst(nn.Module):
        batch_first = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

    model = nn.Sequential(TimeFirst(), nn.GRU(3, 2), nn.GRU(2, 2, batch_first=True))
    axes = example_axes(dict(model.named_modules()), {"2": 0})
    assert axes == {"0": 1, "0.inner": 1, "1": 1, "2": 0}


class Encoder(nn.Module):
    """Two layers inside a module, a head, and a second name for the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.head.weight

    def forward(self, X):
        return self.again(self.head(self.encoder(X)))


CALLED = {
    "a parameter": (["encoder.2.weight"], ["encoder.2.weight"]),
    "a module": (["head"], ["head.weight", "head.bias"]),
    "modules in another order": (
        ["head", "encoder.0"],
        ["head.weight", "head.bias", "encoder.0.weight", "encoder.0.bias"],
    ),
    "a module of modules": (
        ["encoder"],
        ["encoder.0.weight", "encoder.0.bias", "encoder.2.weight", "encoder.2.bias"],
    ),
    "a glob": (["*.bias"], ["encoder.0.bias", "encoder.2.bias", "head.bias"]),
    "a glob of modules": (["encoder.[2-9]"], ["encoder.2.weight", "encoder.2.bias"]),
    "a second name": (["again.weight"], ["head.weight"]),
    "an object": ("head.bias", ["head.bias"]),
}


@pytest.mark.parametrize("case", CALLED)
def test_names_stand_for_parameters(case) -> None:
    given, keys = CALLED[case]
    model = Encoder().double()
    if isinstance(given, str):  # a name beside a tensor
        given = [model.head.bias]
    every = dict(model.named_parameters())
    data = [(normal(5, 3), normal(5, 4, seed=1))]
    by_name = EmpiricalRisk(model, nn.MSELoss(), data, given)
    by_tensor = EmpiricalRisk(model, nn.MSELoss(), data, [every[key] for key in keys])
    assert list(by_name.params) == keys
    assert all(by_name.params[key] is every[key] for key in keys)
    assert torch.equal(GGN(by_name).to_dense(), GGN(by_tensor).to_dense())
    with KFACOptimizer(model, nn.MSELoss(), params=given) as optimizer:
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
            id(every[key]) for key in keys
        ]


def test_names_beside_tensors_and_in_groups() -> None:
    model = Encoder()
    mixed = EmpiricalRisk(model, nn.MSELoss(), (), [model.head.bias, "encoder.0"])
    assert list(mixed.params) == ["head.bias", "encoder.0.weight", "encoder.0.bias"]
    groups = [{"params": ["encoder"], "lr": 0.2}, {"params": [model.head.bias]}]
    with KFACOptimizer(model, nn.MSELoss(), lr=0.1, params=groups) as optimizer:
        sizes = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
        assert sizes == [(0.2, 4), (0.1, 1)]
    assert groups[0]["params"] == ["encoder"]  # as it was given
    model.encoder[0].weight.requires_grad_(False)  # named, frozen ones are taken
    assert "encoder.0.weight" in EmpiricalRisk(model, nn.MSELoss(), (), ["encoder.0"]).params


def test_names_of_nothing_and_names_twice_are_refused() -> None:
    model = Encoder()
    for given in (["encoder.1"], ["encoder.0.weights"], [""], ["head", "bias"]):
        with pytest.raises(ValueError, match=r"`params` names '.*It has 'encoder.0.weight', 'enc"):
            EmpiricalRisk(model, nn.MSELoss(), (), given)
        with pytest.raises(ValueError, match="`params` names '"):
            KFACOptimizer(model, nn.MSELoss(), params=given)
    with pytest.raises(ValueError, match="is the same parameter as"):
        EmpiricalRisk(model, nn.MSELoss(), (), ["head", "head.bias"])
    with pytest.raises(TypeError, match="`params` is a str; expected a list or a dict"):
        EmpiricalRisk(model, nn.MSELoss(), (), "head")
    with pytest.raises(TypeError, match="params is the str 'head'; expected a list of parameters"):
        KFACOptimizer(model, nn.MSELoss(), params="head")
