"""Language models that compute a loss from `labels`: it tells whether ours has to shift them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    Hessian,
    UnsupportedError,
    curvature,
)
from test.cases import close, unchanged
from test.helpers import seeded


@dataclass
class Output:
    """What a model of Hugging Face returns."""

    logits: Tensor
    loss: Tensor | None = None


class Language(nn.Module):
    """A model of tokens that computes its own loss; `shift` says which, `factor` makes it another
    one.
    """

    def __init__(self, shift: bool, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.factor = shift, factor
        self.embedding, self.head = nn.Embedding(9, 3), nn.Linear(3, 9)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))
        if labels is None:
            return Output(logits)
        f, y = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        return Output(logits, self.factor * F.cross_entropy(f.flatten(0, 1), y.flatten()))


def data(sizes: tuple[int, ...] = (5, 2)) -> list[dict[str, Tensor]]:
    generator = seeded(1)
    found = []
    for N in sizes:
        ids = torch.randint(9, (N, 4), generator=generator)
        labels = ids.clone()
        labels[0, 2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_model_tells(shift: bool, reduction: str) -> None:
    model, loss = Language(shift), nn.CrossEntropyLoss(reduction=reduction)
    said = EmpiricalRisk(model, loss, data(), shift_labels=shift)
    v = torch.ones(said.space.dim, dtype=torch.float64)
    with unchanged(model):
        close(EmpiricalRisk(model, loss, data()).loss(), said.loss())
    for key, g in EmpiricalRisk(model, loss, data()).gradient().items():
        close(g, said.gradient()[key])
    for kind in (GGN, Hessian):
        close(kind(EmpiricalRisk(model, loss, data())) @ v, kind(said) @ v)
    close(
        curvature(EmpiricalRisk(model, loss, data()), DiagonalBlock).trace,
        curvature(said, DiagonalBlock).trace,
    )
    estimators = [
        CurvatureEstimator(EmpiricalRisk(model, loss, (), shift_labels=s), KFAC)
        for s in (None, shift)
    ]
    for estimator in estimators:
        estimator.update(data()[0])
    close(estimators[0].operator.trace, estimators[1].operator.trace)


@pytest.mark.parametrize("shift", [False, True])
def test_smoothing_and_weights_are_not_the_models(shift: bool) -> None:
    """A trainer adds them to a model's loss: it is compared without, and they count."""
    weight = torch.arange(1.0, 10.0, dtype=torch.float64)
    for options in (
        {"label_smoothing": 0.2},
        {"weight": weight},
        {"weight": weight, "reduction": "sum"},
    ):
        loss = nn.CrossEntropyLoss(**options)
        risk = EmpiricalRisk(Language(shift), loss, data())
        expected = EmpiricalRisk(risk.model, loss, data(), shift_labels=shift).loss()
        close(risk.loss(), expected)


def test_neither_is_refused_with_the_numbers() -> None:
    risk = EmpiricalRisk(Language(True, 2.0), nn.CrossEntropyLoss(), data())
    words = r"Language computes a loss of its own.* \d\.\d+ for 4 examples; CrossEntropyLoss gives .*shift_labels=False"
    with pytest.raises(UnsupportedError, match=words):
        risk.loss()
    for said in (False, True):
        assert (
            EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data(), shift_labels=said).loss() > 0
        )
    assert EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data(), check=False).loss() > 0


CE = nn.CrossEntropyLoss()


def test_numbers_that_are_not_finite_do_not_tell() -> None:
    model, ids = Language(True), data()[0]["input_ids"]
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    risk = EmpiricalRisk(model, CE, [])
    risk.read({"input_ids": ids, "labels": ids})
    assert risk.checked.shift is None
    nn.init.zeros_(model.head.bias)
    risk.read({"input_ids": ids, "labels": ids})
    assert risk.checked.shift is True


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Strict(Wrapper):
    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids)


class Drops(Wrapper):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return self.inner(input_ids)


WRAPPERS: dict[str, Any] = {
    "keywords": Wrapper,
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "all": lambda model: torch.compile(nn.DataParallel(Wrapper(model))),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("shift", [False, True])
def test_wrapped_models_tell(name: str, shift: bool) -> None:
    inner, (batch,) = Language(shift), data((5,))
    risk = EmpiricalRisk(WRAPPERS[name](inner), CE, [batch])
    close(risk.loss(), inner(**batch).loss)
    assert risk.checked.shift is shift


class Silent(Language):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        return Output(super().forward(input_ids).logits)


class Fails(Language):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        if labels is not None:
            raise KeyError("labels of another form")
        return super().forward(input_ids)


def test_models_that_tell_no_loss_are_not_shifted() -> None:
    inner = Language(True)
    expected = EmpiricalRisk(inner, CE, data(), shift_labels=False).loss()
    for model in (Silent(True), Fails(True), Drops(inner), Strict(inner), Wrapper(Strict(inner))):
        close(EmpiricalRisk(model, CE, data()).loss(), expected)


class Translates(Language):
    """Its decoder reads the labels."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        if labels is None and self.shift:
            raise ValueError("specify decoder_input_ids")
        out = super().forward(input_ids, labels)
        return out if labels is None else super().forward(labels.clamp(min=0).flip(1), labels)


@pytest.mark.parametrize("fails", [False, True])
def test_outputs_that_depend_on_labels(fails: bool) -> None:
    with pytest.raises(
        UnsupportedError, match=r"Translates .*decoder_input_ids=model.prepare_decoder_input_ids"
    ):
        EmpiricalRisk(Translates(fails), CE, data()).loss()


def test_outputs_by_position() -> None:
    """With labels a tuple, like an output of Hugging Face, begins with the loss."""

    class Indexed(Output):
        def __getitem__(self, index: int) -> Tensor:
            return [t for t in (self.loss, self.logits) if t is not None][index]

    class ByPosition(Language):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            out = super().forward(input_ids, labels)
            return Indexed(out.logits, out.loss)

    class AsTuple(Language):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            out = super().forward(input_ids, labels)
            return (out.logits,) if out.loss is None else (out.loss, out.logits)

    class AsDict(Language):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            return {
                key: t
                for key, t in vars(super().forward(input_ids, labels)).items()
                if t is not None
            }

    (batch,) = data((5,))
    for kind, pick in (
        (ByPosition, lambda o: o[0]),
        (AsTuple, lambda o: o[0]),
        (AsDict, lambda o: o["logits"]),
    ):
        risk = EmpiricalRisk(kind(True), last_axis, [batch], output=pick, reduction="mean")
        risk.read(batch)
        assert risk.checked.shift is True


def last_axis(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), y.flatten())


# ------------------------------------------------------------ outputs with classes on the last axis
class Plain(nn.Module):
    """A model of `V` tokens that returns a dict, or a tensor, `[N, T, V]`; its own loss reads the
    last axis.
    """

    def __init__(self, V: int, shift: bool = True, logarithms: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.logarithms = shift, logarithms
        self.embedding, self.head = nn.Embedding(V, 3), nn.Linear(3, V)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))
        scores = scores.log_softmax(-1) if self.logarithms else scores
        if labels is None:
            return {"scores": scores}
        f, y = (scores[:, :-1], labels[:, 1:]) if self.shift else (scores, labels)
        return {"scores": scores, "loss": F.cross_entropy(f.flatten(0, 1), y.flatten())}


def texts(V: int, T: int) -> list[dict[str, Tensor]]:
    generator = seeded(1)
    ids = [torch.randint(V, (N, T), generator=generator) for N in (5, 2)]
    return [{"input_ids": x, "labels": x.clone()} for x in ids]


@pytest.mark.parametrize("logarithms", [False, True])
@pytest.mark.parametrize("said", [None, True])
@pytest.mark.parametrize(
    ("V", "T"), [(9, 4), (4, 5), (5, 5), (2, 3)]
)  # also such that axis 1 could hold the classes
def test_shifted_labels_have_classes_on_the_last_axis(
    V: int, T: int, said: bool | None, logarithms: bool
) -> None:
    model, items = Plain(V, logarithms=logarithms), texts(V, T)
    loss = nn.NLLLoss() if logarithms else CE
    risk = EmpiricalRisk(model, loss, items, output=lambda out: out["scores"], shift_labels=said)
    wide = {key: torch.cat([item[key] for item in items]) for key in items[0]}
    f = model(wide["input_ids"])["scores"][:, :-1]
    expected = F.cross_entropy(f.flatten(0, 1), wide["labels"][:, 1:].flatten())
    close(risk.loss(), expected)
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    for own, g in zip(risk.gradient().values(), gradient, strict=True):
        close(own, g)
    if logarithms:
        return

    pairs = [(item["input_ids"], item["labels"][:, 1:]) for item in items]
    by_hand = EmpiricalRisk(
        model, CE, pairs, output=lambda out: out["scores"][:, :-1].movedim(-1, 1)
    )
    close(GGN(risk).to_dense(), GGN(by_hand).to_dense())
    close(curvature(risk, DiagonalBlock).trace, curvature(risk, EKFAC).trace)


def test_shifted_labels_need_positions() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    risk = EmpiricalRisk(
        model, CE, [(torch.rand(2, 3), torch.rand(2, 4).softmax(-1))], shift_labels=True
    )
    with pytest.raises(
        ValueError, match=r"CrossEntropyLoss: labels are shifted .* of shape \[2, 4\]"
    ):
        risk.loss()


def test_classes_on_the_last_axis_are_not_read_from_axis_1() -> None:
    """Without a shift, of as many tokens as classes, axis 1 is PyTorch's; the model's own loss
    tells of the other.
    """
    model, items = Plain(4, shift=False), texts(4, 4)
    with pytest.raises(
        (UnsupportedError, ValueError), match=r"Plain computes a loss of its own|pass `output="
    ):
        EmpiricalRisk(model, CE, items, output=lambda out: out["scores"]).loss()
    moved = EmpiricalRisk(model, CE, items, output=lambda out: out["scores"].movedim(-1, 1)).loss()
    wide = torch.cat([item["labels"] for item in items])
    close(moved, model(wide, labels=wide)["loss"])
