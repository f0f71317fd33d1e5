"""Gradients of each example's un-reduced loss, and which training examples made a prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.applications.order import require_order
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import LinearOperator, Space
from curvlinops_plus.linalg.arithmetic import operator_of
from curvlinops_plus.options import flag, instance
from curvlinops_plus.risk import Draws, Empirical, EmpiricalRisk, Layer, LayerBatch, Totals, Vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.function_reads import layers_of, look_for_functions
from curvlinops_plus.risk.loss_passes import LossWeights, loss_weights
from curvlinops_plus.risk.preserve import preserve_state, untraced
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.risk import takes_risk

#: A function of a layer's batch; its results are tensors [V, N, ...] under keys of its own.
Take = Callable[[LayerBatch], Mapping[Any, Tensor]]


@takes_risk
def per_example_gradients(
    risk: EmpiricalRisk, *, per_term: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Gradients of the un-reduced loss of each example, one batch of the data after the other.

    Examples come in the order in which the data are read, so with a `DataLoader` in order
    (`shuffle=False`) the n-th one is `dataset[n]`; `drop_last=True` leaves out the last ones. Data
    that are shuffled are refused.

    The loss of example n is `ℓ_n = Σ_r ℓ(f(x_n)_r, y_{n,r})`, the sum over its terms (tokens,
    pixels, outputs) of what `reduction="none"` returns, with class weights, ignored targets and so
    on: nothing is divided by a number of examples or terms. The gradient of the risk is `c Σ_n
    ∇ℓ_n`, with the factor `c` of its reduction. Of several losses `ℓ_n` is the sum, in which each
    has its weight relative to the first one under "mean".

    Modes, buffers and random numbers are restored when the iteration ends.

    Args:
        risk: Model, loss, data and parameters. A mask of the risk is about statistics of layers,
            and weights of examples are about their mean: neither matters.
        per_term: The gradient of each loss term by itself, `∇ℓ_{n,r}`: for each token instead of
            each sequence.

    Yields:
        For each batch the name of each parameter to `[N, *shape]`, or `[N, R, *shape]` with
        `per_term`, in the parameters' precision, float32 at least. Parameters that a batch does not
        use have gradients of zero.

    Raises:
        UnsupportedError: If the loss has no likelihood, examples depend on each other, a layer has
            no gradients of each example, or the risk has several processes; with `per_term`, of
            several losses.
        ValueError: If there are no data, or they are shuffled.

    Cost: one forward and one backward pass, with `per_term` R backward passes; memory for the
    gradients of a batch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, per_example_gradients
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> y = torch.tensor([[1.0], [0.0], [-1.0]])
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(X[:2], y[:2]), (X[2:], y[2:])])
        >>> for gradients in per_example_gradients(risk):  # -2 x y
        ...     print(gradients["weight"])
        tensor([[[-2., -4.]],
        <BLANKLINE>
                [[ 0.,  0.]]])
        tensor([[[10., 12.]]])
    """
    _refuse(risk, per_term)

    def gradients() -> Iterator[dict[str, Tensor]]:
        desc = "gradients of examples"
        for batch in _batch_gradients(risk, per_term, desc, methodcaller("param_grads")):
            filled = fill_unused(batch.parts, risk, batch.num_vectors, batch.num_examples)
            if per_term:
                yield {key: batch.factor * g.transpose(0, 1) for key, g in filled.items()}
            else:
                yield {key: batch.factor * g[0] for key, g in filled.items()}

    return gradients()


def fill_unused(
    gradients: Mapping[str, Tensor], risk: EmpiricalRisk, V: int, N: int
) -> dict[str, Tensor]:
    """Gradients `[V, N, *shape]` of all parameters, zero for those that a batch did not use."""
    filled = {}
    for key, p in risk.params.items():
        if key in gradients:
            filled[key] = gradients[key]
        else:
            filled[key] = p.new_zeros(V, N, *p.shape, dtype=risk.dtype)
    return filled


class _BatchGradients(NamedTuple):
    """What was made of the gradients of one batch.

    Attributes:
        parts: Results of `take`, [V, N, ...].
        num_vectors: V, 1 or the number of loss terms per example.
        num_examples: N.
        factor: What gradients have to be multiplied by.
    """

    parts: dict[Any, Tensor]
    num_vectors: int
    num_examples: int
    factor: float


def _batch_gradients(
    risk: EmpiricalRisk, per_term: bool, desc: str, take: Take
) -> Iterator[_BatchGradients]:
    """Send back the gradients of the examples' un-reduced losses, or of each term by itself, batch
    by batch.
    """
    risk = copy(risk)
    risk.options = replace(risk.options, mask=None)
    vectors = Empirical(per_term=per_term)
    with preserve_state(risk.model, risk.data):
        weights = loss_weights(risk)
        layers = layers_of(risk)
        for batch in risk.batches(desc):
            # A weight is about the mean over examples, as the mask is.
            batch = replace(batch, weight=None)
            parts, totals = send_back(risk, vectors, weights, batch, layers, take)
            # Gradients come with √(relative weight) of each loss, and that of the loss is wanted.
            ratios = [w / loss.weight for w, loss in zip(totals.weights, risk.losses, strict=True)]
            num_vectors = totals.terms // totals.examples if per_term else 1
            yield _BatchGradients(parts, num_vectors, batch.num_examples, max(ratios) ** 0.5)


@untraced
def send_back(
    risk: EmpiricalRisk,
    vectors: Vectors,
    weights: LossWeights,
    batch: Batch,
    layers: list[Layer],
    take: Take,
) -> tuple[dict[Any, Tensor], Totals]:
    """The results of `take` for the layers of one batch, all vectors together.

    If functions turn out to read parameters, the list `layers` is changed, and the batch is run
    again.
    """
    while True:
        parts = defaultdict[Any, list[Tensor]](list)
        recorder = Recorder(risk, layers, vectors, weights)

        def consume(layer_batch: LayerBatch, parts: defaultdict[Any, list[Tensor]] = parts) -> None:
            for key, part in take(layer_batch).items():
                parts[key].append(part)

        try:
            with recorder.hooked():
                totals = recorder.observe(batch, Draws(0), consume)
            return {key: torch.cat(part) for key, part in parts.items()}, totals
        except OutsideReads as error:
            look_for_functions(risk, batch, error)
            layers[:] = layers_of(risk)


def _refuse(risk: EmpiricalRisk, per_term: bool) -> None:
    """Refuse what has no gradients of single examples, or examples in an unknown order."""
    flag("per_term", per_term)
    for loss in risk.losses:
        loss.require_likelihood()
    if risk.processes.world > 1:
        raise UnsupportedError(
            "Gradients of each example stay in its process: make a risk without `processes=` there."
        )
    if per_term and len(risk.losses) > 1:
        raise UnsupportedError(
            "per_term=True is about the terms of one loss; there are losses "
            f"{risk.losses.output_keys}."
        )
    require_order(risk)


def attribution_scores(
    P: LinearOperator,
    queries: EmpiricalRisk,
    train: EmpiricalRisk,
    *,
    per_term: bool = False,
) -> Tensor:
    """Influence of training examples on the losses of queries, `∇ℓ_qᵀ P ∇ℓ_n`.

    **Signs.** A large positive score means that the training example helped: it pulls the network
    to a lower loss of the query, and without it this loss would be higher. A negative one means
    that it harmed. (The derivative of the query's loss by the example's weight in training has the
    opposite sign: more weight, less loss.) With `P` the inverse of the curvature of the summed
    loss, the score is to first order by how much the query's loss rises if the network is trained
    again without the example; with that of the mean loss, N times as much.

    Gradients are those of the un-reduced losses, as in `per_example_gradients`: a risk's reduction
    doesn't matter.

    Args:
        P: A matrix on the space of the parameters, such as `K.inverse(damping)` of a KFAC, EKFAC or
            diagonal approximation, or `CGInverseLinearOperator(GGN(risk).shift(damping))`. The
            identity gives inner products of gradients.
        queries: Risk whose data are the Q queries.
        train: Risk whose data are the N training examples, of the same model and parameters. Make
            both of data in order, such as a second `DataLoader` with `shuffle=False`.
        per_term: Scores of each loss term of a training example, such as each token, from the
            gradient of its own loss: they add up to those of the examples.

    Returns:
        `[Q, N]`, or `[Q, N, R]` with `per_term`: `[q, n]` is of the q-th query and the n-th
        training example that are read, so column n is `dataset[n]`. `drop_last=True` leaves out the
        last columns.

    Raises:
        ValueError: If the risks have different models or parameters, or data are shuffled.
        RuntimeError: If `per_term` meets examples with different numbers of terms.
        UnsupportedError: As for `per_example_gradients`.

    Cost: one pass over each data set, and a product of `P` with Q columns. Memory for Q vectors of
    parameters. Gradients of training examples are formed in pieces of one layer, whatever their
    number. `progressbar=True` of a risk shows a bar.

    Source: Koh & Liang 2017, "Understanding black-box predictions via influence functions"; Grosse
    et al. 2023, "Studying large language model generalization with influence functions" (EKFAC).

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
    P = operator_of(P, square=False)
    instance("queries", queries, EmpiricalRisk, "an EmpiricalRisk, train.with_data(...)")
    instance("train", train, EmpiricalRisk, "an EmpiricalRisk")
    if queries.model is not train.model or not _agree(queries.params, train.params):
        raise ValueError(
            "Risks of queries and of training examples differ in model or parameters; take "
            "train.with_data."
        )
    _refuse(train, per_term)
    gradients = [*per_example_gradients(queries)]
    stacked = {key: torch.cat([part[key] for part in gradients]) for key in queries.params}
    # u_q = Pᵀ ∇ℓ_q, by parameter [Q, *shape]
    products = _product(P.T, stacked, queries.space)
    vectors = {key: v.to(train.dtype) for key, v in products.items()}
    matrices: dict[Layer, Tensor] = {}  # the same in the layout of each layer, [Q, *b, o, i]

    def take(batch: LayerBatch) -> dict[Layer, Tensor]:
        if batch.layer not in matrices:
            (group,) = batch.layer.groups
            rows = group.layout.gather([vectors[key] for key in group.keys])
            matrices[batch.layer] = rows.unflatten(1, group.layout.matrix_shape)
        return {batch.layer: batch.inner_products(matrices[batch.layer])}

    scores = []
    some_vector = next(iter(vectors.values()))
    for batch in _batch_gradients(train, per_term, "scores of training examples", take):
        # Σ_layers u_qᵀ ∇ℓ_{n,r}, [R, N, Q]
        zeros = some_vector.new_zeros(batch.num_vectors, batch.num_examples, len(some_vector))
        term_scores = batch.factor * sum(batch.parts.values(), zeros)
        scores.append(term_scores.permute(2, 1, 0) if per_term else term_scores[0].T)
    return torch.cat(scores, dim=1)


def _agree(queries: Mapping[str, Tensor], train: Mapping[str, Tensor]) -> bool:
    """Whether all parameters of the queries have these values in training."""
    if not queries.keys() <= train.keys():
        return False
    return all(train[key] is p or torch.equal(train[key], p) for key, p in queries.items())


def self_influence(P: LinearOperator, train: EmpiricalRisk, *, per_term: bool = False) -> Tensor:
    """Influence of training examples on their own loss, `∇ℓ_nᵀ P ∇ℓ_n`: large for mislabelled and
    unusual ones.

    Signs and factors are those of `attribution_scores`, whose diagonal it is: nonnegative for a
    positive semi-definite `P`, and large where the network fits the example only because it was
    trained on it.

    Args:
        P: A matrix on the space of the parameters, such as `K.inverse(damping)`.
        train: Risk whose data are the N examples.
        per_term: The same of each loss term by itself, such as each token; these don't add up to
            those of the examples.

    Returns:
        `[N]`, or `[N, R]` with `per_term`: entry n is of the n-th example that is read,
        `dataset[n]`; `drop_last=True` leaves out the last ones.

    Raises:
        ValueError: If the data are shuffled.
        RuntimeError: If `per_term` meets examples with different numbers of terms.
        UnsupportedError: As for `per_example_gradients`.

    Cost: one pass over the data; for each batch its gradients, and a product of `P` with as many
    columns.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, IdentityLinearOperator, self_influence
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> data = [(torch.ones(2, 1), torch.tensor([[1.0], [3.0]]))]
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), data)
        >>> self_influence(IdentityLinearOperator(risk.space), risk)  # (2 y)²
        tensor([ 4., 36.])
    """
    P = operator_of(P, square=False)
    influences = []
    for gradients in per_example_gradients(train, per_term=per_term):
        rows = train.space.flatten_rows(gradients)  # [N, dim] or [N, R, dim]
        flat = train.space.unflatten_rows(rows.flatten(0, -2))
        products = train.space.flatten_rows(_product(P, flat, train.space)).to(rows.dtype)
        influences.append((rows * products.view(rows.shape)).sum(-1))
    return torch.cat(influences)


def _product(P: LinearOperator, gradients: Mapping[str, Tensor], space: Space) -> dict[str, Tensor]:
    """`P g` for rows `g` of gradients: name to `[K, *shape]`, as the gradients."""
    in_space = _space_with_names(P.in_space, space)
    out_space = _space_with_names(P.out_space, space)
    products = (P @ in_space.flatten_rows(gradients).T).T
    return out_space.unflatten_rows(products.contiguous())


def _space_with_names(space: Space, default: Space) -> Space:
    """A space if it has the names of the default one, in any order; else the default one."""
    return space if space.shapes.keys() == default.shapes.keys() else default
