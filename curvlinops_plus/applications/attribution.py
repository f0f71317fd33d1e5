"""Which training examples made a prediction: influence scores through any inverse of the curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlinops_plus.applications.example_gradients import Add, per_example_gradients, show_gradients
from curvlinops_plus.linalg import LinearOperator, Space
from curvlinops_plus.risk import EmpiricalRisk, Group, Layer, LayerBatch
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.function_reads import layers_of


def attribution_scores(
    P: LinearOperator,
    queries: EmpiricalRisk,
    train: EmpiricalRisk,
    *,
    per_term: bool = False,
    rank: int | None = None,
) -> Tensor:
    """Influence of training examples on the losses of queries, `∇ℓ_qᵀ P ∇ℓ_n`.

    **Signs.** A large positive score means that the training example helped: it pulls the network to a lower loss of
    the query, and without it this loss would be higher. A negative one means that it harmed. (The derivative of the
    query's loss by the example's weight in training has the opposite sign: more weight, less loss.) With `P` the
    inverse of the curvature of the summed loss, the score is to first order by how much the query's loss rises if the
    network is trained again without the example; with that of the mean loss, N times as much.

    Gradients are those of the un-reduced losses, as in `per_example_gradients`: a risk's reduction doesn't matter.

    Args:
        P: A matrix on the space of the parameters, such as `K.inverse(damping)` of a KFAC, EKFAC or diagonal
            approximation, or `CGInverseLinearOperator(GGN(risk).shift(damping))`. The identity gives inner products of
            gradients.
        queries: Risk whose data are the Q queries.
        train: Risk whose data are the N training examples, of the same model and parameters.
        per_term: Scores of each loss term of a training example, such as each token, from the gradient of its own loss:
            they add up to those of the examples.
        rank: Keep only so many singular values of each layer's part of a query's `P ∇ℓ_q`. Default: all.

    Returns:
        `[Q, N]`, or `[Q, N, R]` with `per_term`, in the order of the data.

    Raises:
        TypeError: If `P` is no operator, or one of the risks is none.
        ValueError: If the risks have different models or parameters, `P` another space, `rank` is less than one, or
            `per_term` meets examples with different numbers of terms.
        UnsupportedError: As for `per_example_gradients`.

    Cost: one pass over each data set, and a product of `P` with Q columns. Memory for Q vectors of parameters, or, with
    `rank` r, for Q r (o + i) numbers of a layer [o, i] and the gradients of a batch of queries. Gradients of training
    examples are formed in pieces of one layer, whatever their number. `progressbar=True` of a risk shows a bar.

    Source: Koh & Liang 2017, "Understanding black-box predictions via influence functions"; Grosse et al. 2023,
    "Studying large language model generalization with influence functions" (EKFAC, low rank).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EKFAC, EmpiricalRisk, attribution_scores, curvature
        >>> _ = torch.manual_seed(0)
        >>> model, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
        >>> X, y = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])
        >>> train = EmpiricalRisk(model, loss, [(X, y)])
        >>> P = curvature(train, EKFAC).inverse(damping=0.1)
        >>> scores = attribution_scores(P, train.with_data([(X[:1], y[:1])]), train)
        >>> scores.shape, (scores > 0)  # the same class helps
        (torch.Size([1, 3]), tensor([[ True,  True, False]]))
    """
    _check(P, {"queries": queries, "train": train})
    if rank is not None and rank < 1:
        raise ValueError(f"rank={rank} must be at least 1, or None for all singular values.")
    columns = _preconditioned(P, queries, layers_of(train), rank)
    scores: list[Tensor] = []  # [N, Q] of each vector

    def begin(batch: Batch, layers: Sequence[Layer]) -> Add:
        nonlocal columns
        scores.clear()
        if not columns.keys() >= {*map(_matrix, layers)}:  # functions turned out to read parameters
            tree = {key: t for part in columns.values() for key, t in part.tree().items()}
            columns = {_matrix(layer): _Columns.of(layer, tree) for layer in layers}

        def add(seen: LayerBatch, term: int) -> None:
            for r, part in enumerate(columns[_matrix(seen.layer)].products(seen), term):
                if r < len(scores):
                    scores[r] += part
                else:
                    scores.append(part)

        return add

    found = _Rows()  # [N, Q] or [N, Q, R]
    for batch, R, factor in show_gradients(train, per_term, "scores of training examples", begin):
        Q = len(next(iter(columns.values())).tensors[0])
        blank = torch.zeros(batch.num_examples, Q, dtype=train.dtype, device=train.device)
        scores = scores or [blank] * R
        found.add(factor * (torch.stack(scores, -1) if per_term else scores[0]))
    return found.all().transpose(0, 1)


def self_influence(P: LinearOperator, train: EmpiricalRisk, *, per_term: bool = False) -> Tensor:
    """Influence of training examples on their own loss, `∇ℓ_nᵀ P ∇ℓ_n`: large for mislabelled and unusual ones.

    Signs and factors are those of `attribution_scores`, whose diagonal it is: nonnegative for a positive semi-definite
    `P`, and large where the network fits the example only because it was trained on it.

    Args:
        P: A matrix on the space of the parameters, such as `K.inverse(damping)`.
        train: Risk whose data are the N examples.
        per_term: The same of each loss term by itself, such as each token; these don't add up to those of the examples.

    Returns:
        `[N]`, or `[N, R]` with `per_term`, in the order of the data.

    Raises:
        TypeError: If `P` is no operator, or `train` no risk.
        ValueError: If `P` has another space than the parameters, or `per_term` meets examples with different numbers of
            terms.
        UnsupportedError: As for `per_example_gradients`.

    Cost: one pass over the data; for each batch its gradients, and a product of `P` with as many columns.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, IdentityLinearOperator, self_influence
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.ones(2, 1), torch.tensor([[1.0], [3.0]]))])
        >>> self_influence(IdentityLinearOperator(risk.space), risk)  # (2 y)²
        tensor([ 4., 36.])
    """
    _check(P, {"train": train})
    found = _Rows()
    for gradients in per_example_gradients(train, per_term=per_term):
        rows = train.space.flatten_rows(gradients)  # [N, dim] or [N, R, dim]
        flat = {
            key: g.flatten(0, -1 - p.ndim) for (key, g), p in zip(gradients.items(), train.params.values(), strict=True)
        }
        products = train.space.flatten_rows(_product(P, flat, train.space)).to(rows.dtype)
        found.add((rows * products.view(rows.shape)).sum(-1))
    return found.all()


#: Names of parameters, and their patterns, which make one matrix.
_Matrix = tuple[tuple[str, str], ...]


def _matrix(layer: Layer) -> _Matrix:
    return tuple(layer.groups[0].layout.patterns.items())


@dataclass(frozen=True)
class _Columns:
    """One layer's part of the vectors `P ∇ℓ_q` of all queries: all numbers.

    Attributes:
        tensors: [Q, dim], the rows of the vectors.
    """

    group: Group
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: Layer, tree: Mapping[str, Tensor], rank: int | None = None) -> _Columns:  # key to [Q, *shape]
        """The part of a layer; of low rank where there is one matrix, and it takes fewer numbers."""
        (group,) = layer.groups
        rows, (*batch, o, i) = group.layout.gather([tree[key] for key in group.keys]), group.layout.matrix_shape
        if rank is None or batch or rank * (o + i) >= o * i:
            return _Columns(group, (rows,))
        U, S, Vh = torch.linalg.svd(rows.unflatten(1, (o, i)), full_matrices=False)
        return _LowRankColumns(group, ((U * S[:, None])[..., :rank].mT.contiguous(), Vh[:, :rank].contiguous()))

    @classmethod
    def cat(cls, parts: Sequence[_Columns]) -> _Columns:
        """The columns of several batches of queries."""
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], tensors=tuple(map(torch.cat, zip(*(part.tensors for part in parts), strict=True))))

    def products(self, seen: LayerBatch) -> Tensor:  # [V, N, Q]
        """Inner products with gradients of examples."""
        return seen.inner_products(self.tensors[0].unflatten(1, self.group.layout.matrix_shape))

    def tree(self) -> dict[str, Tensor]:
        """Key of each parameter to `[Q, *shape]`, flattened or not."""
        return dict(zip(self.group.keys, self.group.layout.scatter(self.tensors[0]), strict=True))


class _LowRankColumns(_Columns):
    """The largest singular values of a layer's matrix.

    `tensors` are [Q, r, o], the left singular vectors times the values, and [Q, r, i], the right ones.
    """

    def products(self, seen: LayerBatch) -> Tensor:
        return seen.inner_products(*self.tensors)

    def tree(self) -> dict[str, Tensor]:
        left, right = self.tensors
        return dict(zip(self.group.keys, self.group.layout.scatter((left.mT @ right).flatten(1)), strict=True))


def _preconditioned(
    P: LinearOperator, queries: EmpiricalRisk, layers: Sequence[Layer], rank: int | None
) -> dict[_Matrix, _Columns]:
    """`P ∇ℓ_q` of all queries, layer by layer; of low rank, one batch of queries after the other."""
    batches = per_example_gradients(queries)
    if rank is None:
        whole = [*batches]
        batches = iter([{key: torch.cat([part[key] for part in whole]) for key in queries.params}])
    parts: dict[Layer, list[_Columns]] = {layer: [] for layer in layers}
    for gradients in batches:
        tree = {key: t.to(queries.dtype) for key, t in _product(P.T, gradients, queries.space).items()}
        for layer, own in parts.items():
            own.append(_Columns.of(layer, tree, rank))
    return {_matrix(layer): _Columns.cat(own) for layer, own in parts.items()}


def _product(P: LinearOperator, gradients: Mapping[str, Tensor], space: Space) -> dict[str, Tensor]:
    """`P g` for rows of gradients, key to `[K, *shape]`, and the same of the products."""
    inside, outside = (
        own if own.shapes.keys() == space.shapes.keys() else space for own in (P.in_space, P.out_space)
    )  # names say what is meant, in any order
    products = (P @ inside.flatten_rows(gradients).T).T
    return outside.unflatten_rows(products.contiguous())


def _check(P: LinearOperator, risks: Mapping[str, EmpiricalRisk]) -> None:
    for name, risk in risks.items():
        if not isinstance(risk, EmpiricalRisk):
            raise TypeError(
                f"`{name}` is a {type(risk).__name__}; expected an EmpiricalRisk of model, loss and data, such as "
                "risk.with_data(batches)."
            )
    first, *others = risks.values()
    for other in others:
        if other.model is not first.model or other.params.keys() != first.params.keys():
            raise ValueError(
                "The risks of queries and of training examples have different models or parameters, so their gradients "
                "can't be multiplied. Make one of the other: train.with_data(batches)."
            )
        if any(p is not first.params[key] and not torch.equal(p, first.params[key]) for key, p in other.params.items()):
            raise ValueError("The risks of queries and of training examples are at different values of the parameters.")
    if not isinstance(P, LinearOperator):
        raise TypeError(
            f"P is a {type(P).__name__}; expected a LinearOperator such as K.inverse(damping). A matrix M of entries "
            "is Dense(M), one of SciPy's from_scipy(M)."
        )
    shapes = dict(first.space.shapes)
    named = dict(P.in_space.shapes) == dict(P.out_space.shapes) == shapes
    if not named and not (P.in_space.matches(first.space) and P.out_space.matches(first.space)):
        raise ValueError(f"{P.label} is no matrix on the {first.space.dim} parameters of the risk, {first.space}.")


class _Rows:
    """Results of one batch after the other, in memory that doubles when it is full.

    A list of small tensors, each made between large ones that are freed, would keep the allocator from giving them
    back.
    """

    def __init__(self) -> None:
        self.rows, self.number = torch.empty(0), 0

    def add(self, part: Tensor) -> None:
        """Add [N, *shape]."""
        if self.number == 0:
            self.rows = part.new_empty(0, *part.shape[1:])
        if self.rows.shape[1:] != part.shape[1:]:
            raise ValueError(
                "per_term=True stacks scores of examples with equally many loss terms; there are batches with "
                f"{self.rows.shape[-1]} and {part.shape[-1]}. Pad the sequences, with targets that the loss ignores."
            )
        end = self.number + len(part)
        if end > len(self.rows):
            larger = part.new_empty(max(end, 2 * len(self.rows)), *part.shape[1:])
            larger[: self.number] = self.rows[: self.number]
            self.rows = larger
        self.rows[self.number : end] = part
        self.number = end

    def all(self) -> Tensor:
        """What was added, [ΣN, *shape]."""
        return self.rows[: self.number].clone()
