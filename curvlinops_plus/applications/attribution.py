"""Which training examples made a prediction: influence scores through any inverse of the curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvlinops_plus.applications.example_gradients import Add, per_example_gradients, refuse, show_batches
from curvlinops_plus.linalg import LinearOperator, Space
from curvlinops_plus.risk import EmpiricalRisk, Layer, LayerBatch
from curvlinops_plus.risk.batches import Batch


def attribution_scores(
    P: LinearOperator,
    queries: EmpiricalRisk,
    train: EmpiricalRisk,
    *,
    per_term: bool = False,
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

    Returns:
        `[Q, N]`, or `[Q, N, R]` with `per_term`, in the order of the data.

    Raises:
        TypeError: If `P` is no operator, or one of the risks is none.
        ValueError: If the risks have different models or parameters, or `P` another space.
        RuntimeError: If `per_term` meets examples with different numbers of terms.
        UnsupportedError: As for `per_example_gradients`.

    Cost: one pass over each data set, and a product of `P` with Q columns. Memory for Q vectors of parameters.
    Gradients of training examples are formed in pieces of one layer, whatever their number. `progressbar=True` of a
    risk shows a bar.

    Source: Koh & Liang 2017, "Understanding black-box predictions via influence functions"; Grosse et al. 2023,
    "Studying large language model generalization with influence functions" (EKFAC).

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
    refuse(train, per_term)
    gradients = [*per_example_gradients(queries)]
    stacked = {key: torch.cat([part[key] for part in gradients]) for key in queries.params}
    vectors = {key: v.to(train.dtype) for key, v in _product(P.T, stacked, queries.space).items()}  # [Q, *shape]
    columns: dict[Layer, Tensor] = {}  # [Q, *b, o, i]
    scores: list[Tensor] = []  # [N, Q] of each vector

    def begin(batch: Batch, layers: Sequence[Layer]) -> Add:
        scores.clear()

        def add(seen: LayerBatch, term: int) -> None:
            (group,) = seen.layer.groups
            if seen.layer not in columns:
                rows = group.layout.gather([vectors[key] for key in group.keys])
                columns[seen.layer] = rows.unflatten(1, group.layout.matrix_shape)
            for r, part in enumerate(seen.inner_products(columns[seen.layer]), term):
                if r < len(scores):
                    scores[r] += part
                else:
                    scores.append(part)

        return add

    found = []  # [N, Q] or [N, Q, R]
    for batch, R, factor in show_batches(train, per_term, "scores of training examples", begin):
        zero = next(iter(vectors.values())).new_zeros(batch.num_examples, len(next(iter(vectors.values()))))
        of_terms = scores or [zero] * R
        found.append(factor * (torch.stack(of_terms, -1) if per_term else of_terms[0]))
    return torch.cat(found).transpose(0, 1)


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
        ValueError: If `P` has another space than the parameters.
        RuntimeError: If `per_term` meets examples with different numbers of terms.
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
    found = []
    for gradients in per_example_gradients(train, per_term=per_term):
        rows = train.space.flatten_rows(gradients)  # [N, dim] or [N, R, dim]
        flat = {
            key: g.flatten(0, -1 - p.ndim) for (key, g), p in zip(gradients.items(), train.params.values(), strict=True)
        }
        products = train.space.flatten_rows(_product(P, flat, train.space)).to(rows.dtype)
        found.append((rows * products.view(rows.shape)).sum(-1))
    return torch.cat(found)


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
