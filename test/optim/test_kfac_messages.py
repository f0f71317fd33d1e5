"""What is said to somebody whose training loop, arguments or network the K-FAC optimizer can't use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus import DiagonalBlock, UnsupportedError
from curvlinops_plus.optim.kfac import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt
from test.optim.test_kfac_optimizer import EXACT, batch, net

Loss = Callable[..., Tensor]


def in_eval(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    return loss(model.eval()(X), y)


def without_gradients(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(X)
    return loss(output.requires_grad_(), y)


def with_other_tensors(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    return loss(functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, X), y)


def written_to(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    output = model(X)
    output += 1.0
    return loss(output, y)


def swapped(model: nn.Module, loss: Loss, X: Tensor, y: Tensor) -> Tensor:
    return loss(F.one_hot(y, 3).double(), model(X))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (in_eval, r"The model was called in eval mode \(write `model\.train\(\)`\), which is not heard"),
        (without_gradients, r"called without gradients \(torch\.no_grad\), which is not heard"),
        (with_other_tensors, "called with other tensors in place of its parameters, which is not heard"),
        (
            lambda model, loss, X, y: nn.CrossEntropyLoss()(model(X), y),
            r"called in training mode, and CrossEntropyLoss, .* another instance .*functional .*optimizer\.listen",
        ),
        (
            lambda model, loss, X, y: loss(model(X)[:, :2], y % 2),
            r"CrossEntropyLoss was called on a tensor of shape \[12, 2\], and not on .* a tensor of shape \[12, 3\].*"
            r"output=, .*squeeze.*movedim\(-1, 1\).*optimizer\.listen",
        ),
        (written_to, "on an output that was written to in place after the model returned it; write to a copy"),
        (swapped, r"with the model's output as its target; write `loss\(model\(X\), y\)`"),
        (
            lambda model, loss, X, y: model[2](X @ model[0].weight.T).sum(),
            "The model was not called, .*copy of the model.*compiled.*closed",
        ),
    ],
)
def test_why_no_batch_was_seen(call: Callable[..., Tensor], message: str) -> None:
    """Each cause by itself: the sentences about the others are not there."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    call(model, loss, *batch()).backward()
    with pytest.raises(RuntimeError, match=f"^No batch was seen since the last step\\. [^.]*{message}.*strict=False"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"The model was not called"):  # what was noticed is of one step
        optimizer.step()
    model.train()
    loss(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert optimizer.last_step.examples == 12


def test_evaluations_are_not_to_blame() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    loss(model.eval()(X), y)
    F.cross_entropy(model.train()(X), y).backward()
    with pytest.raises(RuntimeError, match=r"The model was called in training mode, and CrossEntropyLoss"):
        optimizer.step()


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda f, y: F.cross_entropy(f, y)])
def test_no_batch_of_a_loss_that_is_a_function(loss: Any) -> None:
    model, (X, y) = net(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    loss(model(X), y).backward()
    with pytest.raises(RuntimeError, match=r"is a function, whose .*optimizer\.listen\(\(X, y\)\):`, then") as error:
        optimizer.step()
    assert "loss(model(X), y)" not in str(error.value)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 1), "c": nn.Linear(4, 2)}).double()

    def forward(self, X: Tensor) -> dict[str, Tensor]:
        return {name: head(X) for name, head in self.heads.items()}


@pytest.mark.parametrize("called", ["a", "b", "ab", "cb"])
def test_several_losses_of_which_some_were_called(called: str) -> None:
    model, (X, y) = Heads(), batch()
    losses = {"a": nn.CrossEntropyLoss(), "b": nn.MSELoss(), "c": nn.CrossEntropyLoss()}
    targets = {"a": y, "b": X[:, :1], "c": y % 2}
    optimizer = KFACOptimizer(model, losses, **EXACT)
    output = model(X)
    sum(losses[name](output[name], targets[name]) for name in called).backward()
    titles = [f"loss {name!r} ({type(losses[name]).__name__})" for name in losses if name not in called]
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    said = f"as the other losses were: {', '.join(titles)}. strict"
    assert said in str(error.value)


def test_one_of_several_losses_on_something_else() -> None:
    model, (X, y) = Heads(), batch()
    losses = {"a": nn.CrossEntropyLoss(), "b": nn.MSELoss(), "c": nn.CrossEntropyLoss()}
    optimizer = KFACOptimizer(model, losses, **EXACT)
    output = model(X)
    value = losses["a"](output["a"], y) + losses["c"](output["c"], y % 2)
    (value + losses["b"](output["b"].squeeze(-1), X[:, 0])).backward()
    with pytest.raises(RuntimeError, match=r"were: loss 'b' \(MSELoss\)\. loss 'b' \(MSELoss\) was called on .*\[12\]"):
        optimizer.step()


def test_gradients_that_were_removed() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, damping=LevenbergMarquardt(0.1, interval=1), **EXACT)
    loss(model(X), y).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"One was heard, and its gradients were removed .* once more\.$"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["squeeze", "last axis"])
def test_what_the_message_about_changed_outputs_advises(kind: str) -> None:
    """Both ways give the steps of a model that returns what the loss reads."""
    torch.manual_seed(0)
    X, flattened = torch.randn(6, 5, 4).double(), kind == "last axis"
    if flattened:
        models: list[nn.Module] = [nn.Linear(4, 3).double() for _ in range(2)]
        y, loss, output = torch.randint(3, (6, 5)), nn.CrossEntropyLoss(), lambda out: out.movedim(-1, 1)
    else:
        models = [nn.Sequential(nn.Flatten(), nn.Linear(20, 1)).double() for _ in range(2)]
        y, loss, output = torch.randn(6).double(), nn.MSELoss(), lambda out: out.squeeze(-1)
    models[1].load_state_dict(models[0].state_dict())

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models[1]

        def forward(self, X: Tensor) -> Tensor:
            return output(self.inner(X))

    ours, theirs = KFACOptimizer(models[0], loss, output=output, **EXACT), Returns()
    other = KFACOptimizer(theirs, loss, **EXACT)
    for _ in range(3):
        with ours.listen((X, y)):
            out = models[0](X)
        ours.zero_grad()
        loss(out.flatten(0, 1) if flattened else out.squeeze(-1), y.flatten()).backward()
        ours.step()
        other.zero_grad()
        loss(theirs(X), y).backward()
        other.step()
    for p, q in zip(models[0].parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------ arguments, layers, states
@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_a_model_without_parameters(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"a CrossEntropyLoss, has no parameters .*The model comes first"):
        kind(nn.CrossEntropyLoss(), net())
    with pytest.raises(ValueError, match=r"a Sequential, has no parameters .*params=list\(model\.parameters\(\)\)"):
        kind(net().requires_grad_(False), nn.CrossEntropyLoss())


def test_unfrozen_later() -> None:
    """What the message about frozen parameters advises."""
    model, loss, (X, y) = net().requires_grad_(False), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, params=list(model.parameters()), **EXACT)
    model[2].requires_grad_(True)
    before = [p.clone() for p in model.parameters()]
    for unfrozen in (False, True):
        model[0].requires_grad_(unfrozen)
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
        moved = [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
        assert moved == [unfrozen, unfrozen, True, True]


def test_ekfac_is_no_inverse() -> None:
    with pytest.raises(ValueError, match=r"inverse='eigenbasis'; expected .* approximation=EKFAC\."):
        KFACOptimizer(net(), nn.CrossEntropyLoss(), inverse="eigenbasis")  # type: ignore[arg-type]


def test_a_state_of_another_precision() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    loss(model(X), y).backward()
    optimizer.step()
    other = net().float()
    with pytest.raises(ValueError, match=r"dtype: the state has float64.*`model\.to\(torch\.float64\)`"):
        KFACOptimizer(other, loss, **EXACT).load_state_dict(optimizer.state_dict())
    again = KFACOptimizer(other.to(torch.float64), loss, **EXACT)
    again.load_state_dict(optimizer.state_dict())
    assert again.curvature.steps == 1


@pytest.mark.parametrize("flat", [False, True])
def test_classes_along_the_last_axis(flat: bool) -> None:
    model, (X, y) = nn.Linear(4, 3).double(), (torch.randn(6, 5, 4).double(), torch.randint(3, (6, 5)))
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **EXACT)
    message = r"\[6, 5, 3\] with classes along axis 1 .*say `output=lambda out: out\.movedim\(-1, 1\)`"
    with pytest.raises(ValueError, match=message), optimizer.listen((X, y.flatten() if flat else y)):
        model(X)


class SparseTable(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, sparse=sparse), nn.Linear(12, 3)

    def forward(self, X: Tensor) -> Tensor:
        return self.head(self.table(X).flatten(1))


@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
@pytest.mark.parametrize("looks", [False, True])
def test_sparse_gradients(kind: Any, looks: bool) -> None:
    """A table whose gradient is sparse moves as one whose gradient is not."""
    models, ends = [SparseTable(sparse).double() for sparse in (True, False)], []
    for model in models:
        loss, generator = nn.CrossEntropyLoss(), torch.Generator().manual_seed(0)
        looking = looks and kind is KFACOptimizer
        options: Any = {"damping": LevenbergMarquardt(0.1, interval=1) if looking else 1.0}
        optimizer = kind(model, loss, **EXACT, **options)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1 if kind is KFACPreconditioner else 0.0, momentum=0.9)
        for _ in range(4):
            X, y = torch.randint(7, (6, 3), generator=generator), torch.randint(3, (6,), generator=generator)
            optimizer.zero_grad()
            loss(model(X), y).backward()
            assert model.table.weight.grad is not None
            assert model.table.weight.grad.is_sparse == model.table.sparse
            optimizer.step()
            sgd.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float(ends[0].abs().max()) < 100
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("vectors", ["ggn_exact", "empirical"])
@pytest.mark.parametrize("listening", [False, True])
def test_spectral_norm_that_is_trained(norm: Any, vectors: str, listening: bool) -> None:
    """It is refused, and both ways out that the message names work."""
    loss, (X, y) = nn.CrossEntropyLoss(), batch()

    def train(params: Any, evaluating: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
        optimizer = KFACOptimizer(model, loss, params=params(model), vectors=vectors, approximation=DiagonalBlock)
        before = [p.clone() for p in model.parameters()]
        if evaluating:
            model[0].eval()
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.listen((X, y)) if listening and vectors != "empirical" else nullcontext():
                output = model(X)
            loss(output, y).backward()
            optimizer.step()
        return [p for p, old in zip(model.parameters(), before, strict=True) if not torch.equal(p, old)]

    with pytest.raises(
        UnsupportedError, match=r"\['0'\] have spectral norm in training mode, .*eval\(\).* out of `params`, and give"
    ):
        train(lambda model: None, evaluating=False)
    assert len(train(lambda model: None, evaluating=True)) == 4
    assert len(train(lambda model: list(model[2].parameters()), evaluating=False)) == 2


@pytest.mark.filterwarnings("ignore:.*batch norm in training mode")
def test_batch_norm_that_is_trained_later() -> None:
    """The optimizer was made in eval mode. Also before the first step."""
    model, loss, (X, y) = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model.eval(), loss, **EXACT)
    output = model.train()(X)
    told = r"\['1'\] are batch norm in training mode.*out of `params`, and give"
    with pytest.raises(UnsupportedError, match=told):
        loss(output, y)
    with pytest.raises(UnsupportedError, match=told):
        optimizer.warmup([(X, y)])
    assert optimizer.curvature.examples == 0


@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_sums_without_forgetting(kind: Callable[..., Any]) -> None:
    """The estimator adds batches up then, so that the curvature would grow with every step."""
    with pytest.raises(ValueError, match=r'decay=1 with reduction="sum" would add up.*below 1'):
        kind(net(), nn.CrossEntropyLoss(reduction="sum"), decay=1.0)
    kind(net(), nn.CrossEntropyLoss(reduction="sum"), decay=0.999).close()
    kind(net(), nn.CrossEntropyLoss(), decay=1.0).close()
