"""One random case: a network, data, losses, parameters, and the checks to be made. All of it
follows from a seed.

`draw(seed)` makes a description of plain lists and numbers, and `make(description)` the objects;
descriptions can be stored, printed and shortened. Random numbers come from `random.Random` and from
`torch.Generator` on the CPU.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_map

from test.fuzz import field_pieces  # noqa: F401 (it registers its pieces)
from test.fuzz.losses import draw_loss, links, make_loss, make_target, term_axis, value
from test.fuzz.pieces import Invalid, Shape, draw_piece, sequence
from test.helpers import DEVICE

Description = dict[str, Any]
MOST_PARAMETERS = 70


LINKS: dict[str, Any] = {
    "gaussian": lambda f: torch.cat(
        [f.chunk(2, -1)[0], nn.functional.softplus(f.chunk(2, -1)[1]) + 0.2], -1
    ),
    "positive": lambda f: nn.functional.softplus(f) + 0.2,
    "log-softmax": lambda f: f.log_softmax(min(1, f.ndim - 1)),
    "probability": torch.sigmoid,
    "none": lambda f: f,
}


class Head(nn.Module):
    """Features to the outputs that a loss reads, in one of the usual shapes."""

    def __init__(
        self, shape: Shape, form: str, classes: int, linear: bool, link: str, axis_last: bool
    ) -> None:
        super().__init__()
        self.form, self.link, self.axis_last = form, link, axis_last
        features = math.prod(shape) if form in ("vector", "numbers") else shape[-1]
        out = 1 if form == "numbers" else classes
        fits = form == "raw" or (features == out and not linear)
        self.layer = nn.Identity() if fits else nn.Linear(features, out)

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x.flatten(1) if self.form in ("vector", "numbers") else x)
        if self.form in ("numbers", "rows"):  # [N], [N·R, C]
            f = f.flatten(0) if self.form == "numbers" else f.flatten(0, -2)
        elif self.form == "positions" and not self.axis_last:
            f = f.movedim(-1, 1)
        return LINKS[self.link](f)


class Network(nn.Module):
    """A body, and one head for each loss; of the form "later" features come first."""

    def __init__(self, body: nn.Module, heads: list[nn.Module], form: str) -> None:
        super().__init__()
        self.body, self.heads, self.form = body, nn.ModuleList(heads), form

    def forward(self, x: Any) -> Any:
        x = x["x"] if isinstance(x, Mapping) else x
        h = self.body(x.clone())  # pieces write in place, and inputs are the user's
        outputs = [head(h) for head in self.heads]
        if self.form == "single":
            return outputs[0]
        if self.form == "later":
            return h, outputs[0]
        return (
            tuple(outputs)
            if self.form == "tuple"
            else {f"out{k}": f for k, f in enumerate(outputs)}
        )


class Loader:
    """An iterable that is no list, and makes its batches anew each time."""

    def __init__(self, data: Sequence[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.data:
            yield x.clone(), y


@dataclass(eq=False)
class Case:
    """A description made real: with a loss for each output, and the parameters as they are handed
    over and by key.
    """

    about: Description
    model: nn.Module
    losses: list[nn.Module]
    data: list[Any]
    params: Any
    keyed: dict[str, Tensor]
    dtype: torch.dtype

    @property
    def several(self) -> bool:
        return len(self.losses) > 1

    @property
    def weights(self) -> list[float]:
        """What each loss is multiplied by."""
        return [o["factor"] for o in self.about["losses"]]

    @property
    def loss(self) -> Any:
        """The loss as users hand it over."""
        if not self.several:
            return self.losses[0]
        pairs = tuple(zip(self.losses, self.weights, strict=True))
        return (
            pairs
            if self.about["form"] == "tuple"
            else {f"out{k}": pair for k, pair in enumerate(pairs)}
        )

    @property
    def options(self) -> dict[str, Any]:
        """More keywords of the risk."""
        options: dict[str, Any] = {}
        if self.about["num_data"] is not None:
            options["num_data"] = self.about["num_data"]
        if self.about["reading"] == "mapping":
            options["batch_size_fn"] = lambda X: len(X["x"])
        if self.about["form"] == "later":
            options["output"] = lambda out: out[1]
        return options

    def shown(self, data: Sequence[Any]) -> Any:
        """Batches as users hand them over."""
        if self.about["reading"] == "mapping":
            return [({"x": x}, y) for x, y in data]
        return Loader(data) if self.about["reading"] == "loader" and data else list(data)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.keyed.values())

    def outputs(self, out: Any) -> list[Tensor]:
        """What each loss reads of what the model returns."""
        if isinstance(out, Tensor):
            return [out]
        if self.about["form"] == "later":
            return [out[1]]
        return list(out.values()) if isinstance(out, Mapping) else list(out)

    def generator(self, what: str) -> Generator:
        """Random numbers of this case for one purpose."""
        return Generator().manual_seed(zlib.crc32(f"{self.about['seed']} {what}".encode()))

    def normal(self, *shape: int, what: str = "") -> Tensor:
        """Standard normal numbers in the case's precision."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator(what)).to(
            DEVICE, self.dtype
        )


# ------------------------------------------------------------------------------------------ drawing
INPUTS: list[Shape] = [
    (3,),
    (4,),
    (3, 2),
    (2, 3),
    (4, 2),
    (2, 4),
    (2, 3, 3),
    (1, 4, 3),
    (2, 2, 2, 2),
    (1, 2, 3, 2),
]


def draw(seed: int) -> Description:
    """The description of a case, without checks."""
    r = Random(seed)
    while True:
        about = _draw_once(r, seed)
        try:
            case = make(about)
            if 0 < case.size <= MOST_PARAMETERS and differentiable(case):
                return about
        except Invalid:
            pass


def differentiable(case: Case) -> bool:
    """Whether nothing that a backward pass needs is overwritten, and the losses fit every batch."""
    model, x = copy.deepcopy(case.model).requires_grad_(), case.data[0][0]
    x = x if case.about["tokens"] else x.clone().requires_grad_()
    inputs = [*model.parameters(), *([] if case.about["tokens"] else [x])]
    try:
        total = sum(f.sum() for f in case.outputs(model(x)))
        torch.autograd.grad(total, inputs, allow_unused=True)  # type: ignore[arg-type]
        for x, y in case.data:
            outputs, targets = case.outputs(model(x.clone())), case.outputs(y)
            for each in zip(case.about["losses"], case.losses, outputs, targets, strict=True):
                value(*each)
    except RuntimeError:
        return False
    return True


def _draw_once(r: Random, seed: int) -> Description:
    tokens = r.random() < 0.15
    shape: Shape = (
        (r.randint(2, 3),) if tokens else r.choices(INPUTS, [3, 3, 3, 2, 2, 2, 3, 2, 1, 1])[0]
    )
    about: Description = {
        "seed": seed,
        "dtype": "float32" if r.random() < 0.15 else "float64",
        "tokens": tokens,
        "input": list(shape),
        "sizes": [r.randint(1, 3) for _ in range(r.randint(1, 3))],
        "layers": [],
        "longer": len(shape) == 2 and r.random() < 0.2,
    }
    if r.random() < 0.4:
        about["sizes"] = [*about["sizes"][:2], 1]
    number = r.choice([1, 2, 2, 3, 3, 4, 5])
    for position in range(number):
        first = tokens and position == 0
        layer = draw_piece(r, shape, tokens=first)
        try:
            _, after = sequence(shape, [layer], first)
        except Invalid:
            continue
        about["layers"].append(layer)
        shape = after
    if tokens and not about["layers"]:
        raise Invalid("tokens without an embedding")
    about |= _draw_outputs(r, shape)
    names = r.choices(
        ["all", "reversed", "some", "named", "weights", "biases", "default"],
        [5, 1, 2, 1.5, 0.5, 0.5, 1],
    )
    about["params"] = names[0]
    about["frozen"] = r.choices(["none", "all", "some"], [6, 1, 2])[0]
    about["num_data"] = r.choice([None] * 9 + [7])
    about["reading"] = r.choice(["pairs"] * 6 + ["loader", "loader", "mapping"])
    return about


def _draw_outputs(r: Random, shape: Shape) -> Description:
    several = r.random() < 0.12
    known = {"ce": 3, "mse": 2, "bce": 1, "poisson": 0.5}
    losses = [draw_loss(r, known if several else None) for _ in range(2 if several else 1)]
    reduction = r.choice(["mean", "sum"])
    heads = []
    for loss in losses:
        loss["factor"] = r.choice([0.5, 1.0, 2.0]) if several else 1.0
        loss["reduction"] = reduction if several else loss["reduction"]
        forms = (
            ["vector"] * 3
            if len(shape) == 1
            else ["vector", "vector", "positions", "positions", "rows"]
        )
        if loss["kind"] in ("ce", "mse", "bce", "poisson") and shape[0] > 1:
            forms = [*forms, "raw"]
        if loss["kind"] in ("mse", "bce", "poisson") and not several:
            forms = [*forms, "numbers"]
        classes = 2 * r.randint(1, 2) if loss["kind"] == "gaussian" else r.randint(2, 3)
        if loss["kind"] not in ("ce", "nll", "gaussian") and r.random() < 0.2:
            classes = 1
        heads.append({"form": r.choice(forms), "classes": classes, "linear": r.random() < 0.8})
    forms = ["tuple", "dict"] if several else [*["single"] * 6, "later"]
    form = r.choice(forms)
    return {"losses": losses, "heads": heads, "form": form}


# ------------------------------------------------------------------------------------------- making
def make(about: Description) -> Case:
    """The objects of a description.

    Raises:
        Invalid: If it describes none.
    """
    dtype = getattr(torch, about["dtype"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body, shape = sequence(tuple(about["input"]), about["layers"], about["tokens"])
        heads: list[nn.Module] = []
        for head, loss in zip(about["heads"], about["losses"], strict=True):
            if len(shape) == 1 and head["form"] in ("positions", "rows"):
                raise Invalid("there is one position only")
            heads.append(
                Head(shape, **head, link=links(loss), axis_last=loss["kind"] not in ("ce", "nll"))
            )
        model = Network(body, heads, about["form"]).double().eval()
    case = Case(about, model, [], [], None, {}, dtype)
    _initialize(case)
    inputs = [_input(case, n, index) for index, n in enumerate(about["sizes"])]
    try:
        with torch.no_grad():
            shapes = [[f.shape for f in case.outputs(model(x))] for x in inputs]
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise Invalid(f"the network: {error}") from error
    if about["longer"] and any(head["form"] == "raw" for head in about["heads"]):
        raise Invalid("lengths that differ make no classes")
    if about["longer"] and any(
        o["kind"] == "other" and o["reduction"] == "mean" for o in about["losses"]
    ):
        raise Invalid("means of unknown losses weigh batches by their examples")
    case.losses = [make_loss(o, shapes[0][k], dtype) for k, o in enumerate(about["losses"])]
    generator = case.generator("targets")
    for x, of_batch in zip(inputs, shapes, strict=True):
        ys = [
            make_target(o, shape, dtype, generator)
            for o, shape in zip(about["losses"], of_batch, strict=True)
        ]
        y: Any = ys[0] if len(ys) == 1 else tuple(ys)
        y = {f"out{k}": t for k, t in enumerate(ys)} if about["form"] == "dict" else y
        case.data.append((x if about["tokens"] else x.to(dtype), y))
    model.to(DEVICE, dtype)
    case.losses = [loss.to(DEVICE) for loss in case.losses]
    case.data = tree_map(lambda t: t.to(DEVICE), case.data)
    _choose_parameters(case)
    return case


def _initialize(case: Case) -> None:
    generator = case.generator("parameters")
    with torch.no_grad():
        for p in case.model.parameters():
            size = p[0].numel() if p.ndim > 1 else 2
            p.copy_(
                torch.randn(p.shape, dtype=torch.float64, generator=generator) / max(1, size) ** 0.5
            )
        for module in case.model.modules():
            if (
                isinstance(module, nn.modules.batchnorm._NormBase)
                and module.running_mean is not None
            ):
                module.running_mean.copy_(
                    torch.randn(module.running_mean.shape, generator=generator)
                )
                assert module.running_var is not None
                module.running_var.copy_(
                    0.5 + torch.rand(module.running_var.shape, generator=generator)
                )


def _input(case: Case, n: int, index: int) -> Tensor:
    shape, generator = case.about["input"], case.generator(f"input {index}")
    if case.about["longer"]:  # by one position from batch to batch
        shape = [shape[0] + index, *shape[1:]]
    if case.about["tokens"]:
        return torch.randint(4, (n, *shape), generator=generator)
    return torch.randn(n, *shape, dtype=torch.float64, generator=generator)


def _choose_parameters(case: Case) -> None:
    r = Random(case.about["seed"] + 1)
    named = list(case.model.named_parameters())
    frozen = case.about["frozen"]
    for _, p in named:
        if frozen == "all" or (frozen == "some" and r.random() < 0.4):
            p.requires_grad_(False)
    how = case.about["params"]
    if how == "default":
        named = [(name, p) for name, p in named if p.requires_grad]
    elif how == "reversed":
        named = named[::-1]
    elif how in ("some", "named"):
        r.shuffle(named)
        named = named[: max(1, r.randint(len(named) // 2, len(named)))]
    elif how in ("weights", "biases"):
        named = [(name, p) for name, p in named if ("bias" in name) == (how == "biases")]
    if not named:
        raise Invalid("no parameters")
    case.keyed = {f"p{k}" if how == "named" else name: p for k, (name, p) in enumerate(named)}
    case.params = (
        None if how == "default" else case.keyed if how == "named" else [p for _, p in named]
    )


def term_axes(case: Case, shapes: list[tuple[int, ...]]) -> list[int]:
    """For each output the axis of the numbers of one term."""
    return [term_axis(o, shape) for o, shape in zip(case.about["losses"], shapes, strict=True)]
