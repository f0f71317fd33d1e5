"""Gradients of each example's un-reduced loss, and which training examples made a prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from operator import methodcaller
from os import PathLike
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from curvlinops_plus.applications.measurement import Measurement, measured
from curvlinops_plus.applications.order import require_order
from curvlinops_plus.applications.score_store import ScoreStore
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.likelihood import OfExamples
from curvlinops_plus.linalg import LinearOperator, Space
from curvlinops_plus.linalg.arithmetic import operator_of
from curvlinops_plus.linalg.numerics import eigh, wide
from curvlinops_plus.options import flag, instance, integer
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
    risk: EmpiricalRisk, *, measurement: Measurement | None = None, per_term: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Gradients of the un-reduced loss of each example, one batch of the data after the other.

    Examples come in the order in which the data are read, so with a `DataLoader` in order
    (`shuffle=False`) the n-th one is `dataset[n]`; `drop_last=True` leaves out the last ones. Data
    that are shuffled are refused.

    The loss of example n is `ℓ_n = Σ_r ℓ(f(x_n)_r, y_{n,r})`, the sum over its terms (tokens,
    pixels, outputs) of what `reduction="none"` returns, with class weights, ignored targets and so
    on: nothing is divided by a number of examples or terms. The gradient of the risk is `c Σ_n
    ∇ℓ_n`, with the factor `c` of its reduction. Of several losses `ℓ_n` is the sum, in which each
    has its weight relative to the first one under "mean". Of a loss without a likelihood, any
    function, `ℓ_n` is what it returns for the example alone.

    Modes, buffers and random numbers are restored when the iteration ends.

    Args:
        risk: Model, loss, data and parameters. A mask of the risk is about statistics of layers,
            and weights of examples are about their mean: neither matters.
        measurement: What to differentiate instead of the loss: `measurement(outputs, targets)`
            gives a number for each example, [N], such as a margin.
        per_term: The gradient of each loss term by itself, `∇ℓ_{n,r}`: for each token instead of
            each sequence.

    Yields:
        For each batch the name of each parameter to `[N, *shape]`, or `[N, R, *shape]` with
        `per_term`, in the parameters' precision, float32 at least. Parameters that a batch does not
        use have gradients of zero.

    Raises:
        UnsupportedError: If examples depend on each other, a layer has no gradients of each
            example, or the risk has several processes; with `per_term`, of several losses, one
            without a likelihood, or a measurement.
        ValueError: If there are no data, or they are shuffled; if a measurement gives something
            else than a number for each example.

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
    if measurement is not None:
        risk = measured(risk, measurement)
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
    risk: EmpiricalRisk,
    per_term: bool,
    desc: str,
    take: Take,
    is_known: Callable[[int], bool] = lambda number: False,
) -> Iterator[_BatchGradients]:
    """Send back the gradients of the examples' un-reduced losses, or of each term by itself, batch
    by batch.

    Args:
        is_known: Whether nothing is to be done for the batch of this number: it has no parts then.
    """
    vectors = Empirical(per_term=per_term)
    risk = copy(risk.for_vectors(vectors))
    risk.options = replace(risk.options, mask=None)
    with preserve_state(risk.model, risk.data):
        weights = loss_weights(risk)
        layers = layers_of(risk)
        for number, batch in enumerate(risk.batches(desc)):
            if is_known(number):
                yield _BatchGradients({}, 0, batch.num_examples, 1.0)
                continue
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
    unknown = [loss.title for loss in risk.losses if loss.likelihood is None]
    if per_term and (unknown or isinstance(risk.losses[0].likelihood, OfExamples)):
        raise UnsupportedError(
            f"per_term=True is about the terms of a likelihood, and {unknown or 'a measurement'} "
            "has none; see @register_likelihood."
        )
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


@overload
def attribution_scores(
    P: LinearOperator,
    queries: EmpiricalRisk,
    train: EmpiricalRisk,
    *,
    measurement: Measurement | None = None,
    per_term: bool = False,
    per_layer: Literal[False] = False,
    rank: int | None = None,
    store: str | PathLike[str] | None = None,
) -> Tensor: ...


@overload
def attribution_scores(
    P: LinearOperator,
    queries: EmpiricalRisk,
    train: EmpiricalRisk,
    *,
    measurement: Measurement | None = None,
    per_term: bool = False,
    per_layer: Literal[True],
    rank: int | None = None,
    store: str | PathLike[str] | None = None,
) -> dict[str, Tensor]: ...


def attribution_scores(
    P: LinearOperator,
    queries: EmpiricalRisk,
    train: EmpiricalRisk,
    *,
    measurement: Measurement | None = None,
    per_term: bool = False,
    per_layer: bool = False,
    rank: int | None = None,
    store: str | PathLike[str] | None = None,
) -> Tensor | dict[str, Tensor]:
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
        measurement: What is explained instead of the loss of a query, as for
            `per_example_gradients`: the score is by how much it rises without the example.
        per_term: Scores of each loss term of a training example, such as each token, from the
            gradient of its own loss: they add up to those of the examples.
        per_layer: Scores through the parameters of each layer: they add up to the whole.
        rank: Queries are projected to the nearest matrix of this rank: training examples are
            multiplied with so many vectors instead of Q. Exact from Q on.
        store: A folder, in which scores are kept batch by batch. A run that was interrupted goes
            on there, with the same `P`, queries and batches.

    Returns:
        `[Q, N]`, or `[Q, N, R]` with `per_term`; with `per_layer` name of the layer to such a
        tensor. `[q, n]` is of the q-th query and the n-th
        training example that are read, so column n is `dataset[n]`. `drop_last=True` leaves out the
        last columns.

    Raises:
        ValueError: If the risks have different models or parameters, or data are shuffled; if the
            store has scores of something else.
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
    flag("per_layer", per_layer)
    rank = integer("rank", rank, low=1, optional=True)
    if queries.model is not train.model or not _agree(queries.params, train.params):
        raise ValueError(
            "Risks of queries and of training examples differ in model or parameters; take "
            "train.with_data."
        )
    _refuse(train, per_term)
    gradients = [*per_example_gradients(queries, measurement=measurement)]
    stacked = {key: torch.cat([part[key] for part in gradients]) for key in queries.params}
    # u_q = Pᵀ ∇ℓ_q, by parameter [Q, *shape]
    products = _product(P.T, stacked, queries.space)
    vectors = {key: v.to(train.dtype) for key, v in products.items()}
    kept = None
    if store is not None:
        kept = ScoreStore(store, _about(vectors, train, per_term, per_layer, rank))
    names = [layer.name for layer in layers_of(train)] if per_layer else [""]
    factor = _QueryVectors(vectors, rank)

    def is_kept(number: int) -> bool:
        return kept is not None and kept.has(number)

    scores = defaultdict[str, list[Tensor]](list)
    desc = "scores of training examples"
    sweep = _batch_gradients(train, per_term, desc, factor.inner_products, is_kept)
    for number, batch in enumerate(sweep):
        if kept is not None and kept.has(number):
            parts = kept.read(number, batch.num_examples)
        else:
            by_term = factor.scores(batch, names)
            parts = {key: part if per_term else part[..., 0] for key, part in by_term.items()}
            if kept is not None:
                kept.write(number, batch.num_examples, parts)
        for name, part in parts.items():
            scores[name].append(part.to(factor.like))
    joined = {name: torch.cat(parts, dim=1) for name, parts in scores.items()}
    return joined if per_layer else joined[""]


class _QueryVectors:
    """Vectors `u_q` that gradients of training examples are multiplied by.

    Args:
        vectors: Name of each parameter to `[Q, *shape]`.
        rank: Replace these by the nearest matrix of this rank.
    """

    def __init__(self, vectors: dict[str, Tensor], rank: int | None) -> None:
        self.like = next(iter(vectors.values()))
        #: `W_rᵀ U`, by parameter [rank, *shape]; U itself where no rank is given.
        self._vectors = vectors
        #: `W_rᵀ`, [rank, Q].
        self._mixing: Tensor | None = None
        #: The vectors in the layout of each layer, [rank, *b, o, i].
        self._matrices: dict[Layer, Tensor] = {}
        if rank is None or rank >= len(self.like):
            return
        # With U = W S Vᵀ and U Uᵀ = W S² Wᵀ the nearest one is W_r W_rᵀ U.
        gram = sum([(v.flatten(1) @ v.flatten(1).T).to(wide(v)) for v in vectors.values()])
        assert isinstance(gram, Tensor)
        basis = eigh(gram)[1][:, -rank:]
        self._vectors = {key: torch.tensordot(basis.T.to(v), v, 1) for key, v in vectors.items()}
        self._mixing = basis.T.to(self.like)

    def inner_products(self, batch: LayerBatch) -> dict[Layer, Tensor]:
        """With the gradients of each example that one layer contributes, [R, N, rank]."""
        if batch.layer not in self._matrices:
            (group,) = batch.layer.groups
            rows = group.layout.gather([self._vectors[key] for key in group.keys])
            self._matrices[batch.layer] = rows.unflatten(1, group.layout.matrix_shape)
        return {batch.layer: batch.inner_products(self._matrices[batch.layer])}

    def scores(self, batch: _BatchGradients, names: list[str]) -> dict[str, Tensor]:
        """`Σ_layers u_qᵀ ∇ℓ_{n,r}`, [Q, N, R], by the name of the layer or under "" for all."""
        rank = len(next(iter(self._vectors.values())))
        zeros = self.like.new_zeros(batch.num_vectors, batch.num_examples, rank)
        sums = dict.fromkeys(names, zeros)
        for layer, part in batch.parts.items():
            name = "" if names == [""] else layer.name
            sums[name] = sums.get(name, zeros) + batch.factor * part
        if self._mixing is not None:
            sums = {name: products @ self._mixing for name, products in sums.items()}
        return {name: products.permute(2, 1, 0) for name, products in sums.items()}


def _about(
    vectors: Mapping[str, Tensor],
    train: EmpiricalRisk,
    per_term: bool,
    per_layer: bool,
    rank: int | None,
) -> dict[str, Any]:
    """What scores in a store depend on: sums tell vectors and parameters apart."""

    def sums(rows: Tensor) -> Tensor:  # [K, dim] -> [K, 3]
        rows = rows.to(wide(rows))
        wave = torch.linspace(0, 40, rows.shape[1], dtype=rows.dtype, device=rows.device).sin()
        return torch.stack([rows.norm(dim=1), rows.sum(1), rows @ wave], 1).cpu()

    theta = train.space.flatten({key: p.detach() for key, p in train.params.items()})
    return {
        "queries": sums(torch.cat([v.flatten(1) for v in vectors.values()], 1)),
        "parameters": sums(theta[None]),
        "per_term": per_term,
        "per_layer": per_layer,
        "rank": rank,
    }


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
