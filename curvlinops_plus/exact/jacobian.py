"""Jacobians of the model's output, and factors `B` of the curvature with `B Bᵀ = GGN`.

Letters: `P` parameters, `N` examples, `R` loss terms per example, `C` numbers per term, `K` columns multiplied at once,
`f` the model's output, `J` its Jacobian `[numbers of f, P]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact.double_backward import plain_attention
from curvlinops_plus.exact.linearize import (
    FunctionModule,
    Linearizer,
    Outputs,
    random_state,
    set_random_state,
)
from curvlinops_plus.linalg import LinearOperator, Space
from curvlinops_plus.risk import Draws, Empirical, EmpiricalRisk, Exact, MonteCarlo, Totals, Vectors
from curvlinops_plus.risk.determinism import training_modules
from curvlinops_plus.risk.nonfinite import first_nonfinite
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch, is_iterator
from curvlinops_plus.risk.vectors import as_vectors

__all__ = ["GGNFactorLinearOperator", "JacobianLinearOperator", "TransposedJacobianLinearOperator"]


# ------------------------------------------------------------------------------------------------ rows from the data
class _Stacked:
    """A matrix `L J [m, P]` whose rows belong to the data in their order; `L` is block-diagonal over batches.

    This one is the Jacobian itself, `L = I`.

    Args:
        owner: Name of the operator, for messages.
        model_func, loss_func, params, data, progressbar, num_data, batch_size_fn: As the operator has them.
        chunk_size: Columns computed together.
        options: Options of `EmpiricalRisk`.
    """

    def __init__(
        self,
        owner: str,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool,
        num_data: int | None,
        batch_size_fn: Callable[[Any], int] | None,
        chunk_size: int | None,
        options: Mapping[str, Any],
    ) -> None:
        model = model_func if isinstance(model_func, nn.Module) else FunctionModule(model_func, params)
        self.owner = owner
        self.risk = EmpiricalRisk(
            model,
            loss_func,
            data,
            params,
            batch_size_fn=batch_size_fn,
            num_data=num_data,
            progressbar=progressbar,
            **options,
        )
        if is_iterator(self.risk.data):
            raise ValueError(
                f"`data` is an iterator, which can be read only once; {owner} reads the data once per product. Pass a "
                "list or a DataLoader."
            )
        self.linear = Linearizer(self.risk, self.read, chunk_size)

    # What a kind of matrix says -------------------------------------------------------------------------------------
    def read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        """Run the model; the one tensor that is differentiated, and what else `L` depends on."""
        return [*self.risk.run(batch, model)[0]], None

    def left(self, draws: Draws) -> Callable[[Tensor, Any], _Left]:
        """What makes the block of `L` that belongs to a batch."""
        return lambda F, extra: _Left(F.shape, lambda V: V, lambda U: U)

    @cached_property
    def space(self) -> Space:
        """The space of the rows."""
        shape, rows, flattened, num_data = torch.Size(), 0, False, self.risk.options.num_data
        with preserve_state(self.risk.model, self.risk.data):
            for batch in self.risk.batches(f"{self.owner}, sizes"):
                N = batch.num_examples
                if not shape:
                    shape = self.output(batch)[0].shape
                    flattened = shape[0] != N  # [N·R, C], and R may differ from batch to batch
                    rows = shape[0]
                    if num_data is not None:
                        rows = num_data * shape[0] // N
                        break
                else:
                    rows += self.output(batch)[0].shape[0] if flattened else N
        return Space.from_shapes([(rows, *shape[1:])])

    @property
    def scale(self) -> float:
        """What multiplies all rows."""
        return 1.0

    # ----------------------------------------------------------------------------------------------------------------
    def output(self, batch: Batch) -> tuple[Tensor, Any]:
        """What `read` returns, without a graph."""
        with torch.inference_mode(False), torch.no_grad(), plain_attention(), torch.compiler.set_stance("force_eager"):
            (F,), extra = self.read(self.risk.model, batch)
        return F, extra

    def push(self, X: Tensor) -> Tensor:  # [P, K] -> [m, K]
        """The product."""
        with preserve_state(self.risk.model, self.risk.data):
            return self._pushed(X)

    def _pushed(self, X: Tensor) -> Tensor:
        """The product, without restoring the random state afterwards."""
        found, ends, left = [], _Ends(self), self.left(Draws(0))
        for batch in self.risk.batches(self.owner):

            def product(F: Outputs, extra: Any) -> Callable[[list[Tensor]], Tensor]:
                block = left(F[0], extra)
                ends.take(block.shape)
                return lambda V: block.transposed(V[0]).flatten(1)

            found.append(self.linear.push(batch, X.T, product))
        ends.close()
        return torch.cat(found, 1).T.to(X.dtype) * self.scale

    def pull(self, X: Tensor) -> Tensor:  # [m, K] -> [P, K]
        """The transposed product."""
        total, ends, left = X.new_zeros(X.shape[1], self.risk.space.dim), _Ends(self), self.left(Draws(0))
        with preserve_state(self.risk.model, self.risk.data):
            for batch in self.risk.batches(self.owner):

                def vectors(F: Outputs, extra: Any) -> list[Tensor]:
                    block = left(F[0], extra)
                    U = X[ends.take(block.shape)].T.to(F[0].dtype)
                    return [block.product(U.reshape(-1, *block.shape))]

                total += self.linear.pull(batch, vectors)
        ends.close()
        return total.T * self.scale

    def dense(self) -> Tensor:  # [m, P]
        """The matrix; each batch by backward passes for its rows, or by tangents of all parameters if these are
        fewer.
        """
        P, found, ends, left = self.risk.space.dim, [], _Ends(self), self.left(Draws(0))
        like = {"dtype": self.risk.dtype, "device": self.risk.device}
        with preserve_state(self.risk.model, self.risk.data):
            for batch in self.risk.batches(self.owner):
                state = random_state(self.risk.device)
                F, extra = self.output(batch)
                set_random_state(self.risk.device, state)
                block = left(F, extra)
                ends.take(block.shape)
                m = block.shape.numel()
                if m <= P:
                    U = torch.eye(m, **like).to(F.dtype).reshape(m, *block.shape)
                    found.append(self.linear.pull(batch, lambda F, extra, block=block, U=U: [block.product(U)]))
                else:

                    def rows(V: list[Tensor], block: _Left = block) -> Tensor:
                        return block.transposed(V[0]).flatten(1)

                    columns = self.linear.push(batch, torch.eye(P, **like), lambda F, extra, rows=rows: rows)
                    found.append(columns.T.to(**like))
        ends.close()
        return torch.cat(found) * self.scale

    def check(self) -> None:
        """Compare two products: the rows belong to the order of the data.

        Raises:
            NumericsError: If the product is not finite.
            RuntimeError: If they differ; says whether it is the order.
        """
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(self.risk.space.dim, 1, generator=generator, dtype=self.risk.dtype).to(self.risk.device)
        with preserve_state(self.risk.model, self.risk.data):
            one, two = self._pushed(v), self._pushed(v)
        if not bool(one.isfinite().all()):
            where = first_nonfinite(self.risk)
            raise NumericsError(
                f"A product with {self.owner} has NaN or infinite entries."
                + (f" First seen: {where}." if where else "")
            )
        tolerance = 1e-8 if self.risk.dtype == torch.float64 else 1e-3

        def close(a: Tensor, b: Tensor) -> bool:
            return a.shape == b.shape and bool((a - b).norm() <= tolerance * a.norm() + 1e-30)

        if close(one, two):
            return
        off = "check_deterministic=False turns this check off."
        if close(one.sort(0)[0], two.sort(0)[0]):
            raise RuntimeError(
                f"Two products of {self.owner} with the same vector have the same entries in another order: the data "
                "come in another order each time (shuffle=True?), and the rows follow that order. Use a loader that "
                f"does not shuffle. {off}"
            )
        random = training_modules(self.risk.model)
        cause = "Do the data change from pass to pass (shuffle=True, random augmentation), or the model?"
        if random:
            cause = f"These modules are in training mode: {random}; call model.eval()."
        raise RuntimeError(f"Two products of {self.owner} with the same vector differ. {cause} {off}")


@dataclass(frozen=True)
class _Left:
    """The block of `L` of one batch: `[*shape]` numbers from those of the output."""

    shape: torch.Size
    transposed: Callable[[Tensor], Tensor]  # [K, *output] -> [K, *shape], the product with L
    product: Callable[[Tensor], Tensor]  # [K, *shape] -> [K, *output], with Lᵀ


class _Ends:
    """Where the rows of the next batch are, and whether all batches together have as many as expected."""

    def __init__(self, rows: _Stacked) -> None:
        (self.shape,), self.owner = rows.space.shapes.values(), rows.owner
        self.start = 0

    def take(self, own: torch.Size) -> slice:
        if self.shape[1:] and own[1:] != self.shape[1:]:
            raise ValueError(
                f"The output has shape {list(own)} in one batch and [*, {', '.join(map(str, self.shape[1:]))}] in "
                f"others. {self.owner} stacks outputs along their first axis: make them agree in all others, for "
                "instance `output=lambda f: f.flatten(0, 1)`, which makes every position a row."
            )
        rows = slice(self.start, self.start + own.numel())
        self.start = rows.stop
        if self.start > self.shape.numel():
            self._raise("more")
        return rows

    def close(self) -> None:
        if self.start != self.shape.numel():
            self._raise("fewer")

    def _raise(self, what: str) -> None:
        raise ValueError(
            f"The data have {what} examples than {self.owner}, with rows {list(self.shape)}, was told by `num_data` or "
            "saw in an earlier pass. Each pass must give the same examples in the same order."
        )


class _RootStacked(_Stacked):
    """`√c B_ℓᵀ J`, with the root `B_ℓ` of every loss term's Hessian, or columns drawn or measured in its place."""

    vectors: Vectors

    def read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        (f,), (y,), (class_axis,) = self.risk.run(batch, model)
        F, Y = self.risk.losses[0].canonical(f, y, batch.num_examples, class_axis)
        return [F], Y

    def left(self, draws: Draws) -> Callable[[Tensor, Any], _Left]:
        vectors, known = self.vectors, self.risk.losses[0].likelihood
        draws = draws if vectors.seed is None else Draws(vectors.seed)

        def make(F: Tensor, Y: Any) -> _Left:
            if isinstance(vectors, Exact):
                return _Left(
                    self.shape_of(F),
                    lambda V: known.hessian_root_transpose_product(F, Y, V),
                    lambda U: known.hessian_root_product(F, Y, U),
                )
            if isinstance(vectors, MonteCarlo):
                columns = known.draw(F, Y, vectors.samples, draws.uniform) / vectors.samples**0.5
            else:
                columns = known.grad(F, Y)[None]
            term = "n r" if self.shape_of(F)[1] == F.shape[1] else "n"
            return _Left(
                self.shape_of(F),
                lambda V: torch.einsum("mnrc,knrc->knrm" if term == "n r" else "mnrc,knrc->knm", columns, V).reshape(
                    len(V), *self.shape_of(F)
                ),
                lambda U: torch.einsum("mnrc,knrm->knrc", columns, U.expand(-1, -1, F.shape[1], -1)),
            )

        return make

    def shape_of(self, F: Tensor) -> torch.Size:
        """Rows of one batch."""
        N, R = F.shape[:2]
        if isinstance(self.vectors, Exact):
            return torch.Size((N, R, self.risk.losses[0].likelihood.num_columns(F)))
        if isinstance(self.vectors, MonteCarlo):
            return torch.Size((N, R, self.vectors.samples))
        return torch.Size((N, R if self.vectors.per_term else 1, 1))  # type: ignore[attr-defined]

    @cached_property
    def _facts(self) -> tuple[Space, float]:
        """Space of the rows, and √c, which only the whole data know."""
        shapes, totals = [], Totals()
        with preserve_state(self.risk.model, self.risk.data):
            for batch in self.risk.batches(f"{self.owner}, sizes"):
                F, Y = self.output(batch)
                shapes.append(self.shape_of(F))
                totals.add(Totals(len(F), len(F) * F.shape[1], self.risk.losses[0].likelihood.count(F, Y)))
        if len({shape[1:] for shape in shapes}) == 1:
            rows = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        else:  # a different number of terms in each batch
            rows = (sum(shape.numel() for shape in shapes),)
        return Space.from_shapes([rows]), float(self.risk.scale(totals)) ** 0.5

    @property
    def space(self) -> Space:  # type: ignore[override]
        return self._facts[0]

    @property
    def scale(self) -> float:
        return self._facts[1]


# --------------------------------------------------------------------------------------------------------- operators
class _RowsOperator(LinearOperator):
    """An operator made of rows that follow the data, or its transpose."""

    _rows: _Stacked
    _transposed: bool = False

    @property
    def risk(self) -> EmpiricalRisk:
        """Model, parameters and data."""
        return self._rows.risk

    @property
    def in_space(self) -> Space:
        return self._rows.space if self._transposed else self.risk.space

    @property
    def out_space(self) -> Space:
        return self.risk.space if self._transposed else self._rows.space

    @property
    def dtype(self) -> torch.dtype:
        return self.risk.dtype

    @property
    def device(self) -> torch.device:
        return self.risk.device

    def _matmat(self, X: Tensor) -> Tensor:
        return self._rows.pull(X) if self._transposed else self._rows.push(X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._rows.push(X) if self._transposed else self._rows.pull(X)

    def _to_dense(self) -> Tensor:
        return self._rows.dense().T if self._transposed else self._rows.dense()


class JacobianLinearOperator(_RowsOperator):
    """The Jacobian of the model's output with respect to the parameters: all outputs of all data, `[N·C, P]`.

    The result is one tensor `[N, *output]`: the outputs of all batches stacked along their first axis, in the order of
    the data, which must be the same in every pass. Nothing is scaled, and targets are not used.

    Args:
        model_func: The network: a module, or a function `(params, X) -> output` (then `params` is a dict).
        params: The parameters, a list or a dict.
        data: Iterable of batches `(X, y)`.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compare two products first.
        num_data: Number of examples. Default: they are counted once.
        batch_size_fn: Number of examples of an input that is no tensor.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.
        risk_options: Keyword options of `EmpiricalRisk`, as `output`, which picks the tensor out of what the model
            returns.

    Raises:
        ValueError: If the data are an iterator, or outputs of different batches can't be stacked.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If the model uses an operation with neither forward mode nor a second derivative.

    Cost: `J @ v` is one forward pass that carries tangents, without a graph (two backward passes for models that have
    no forward mode); the transposed product is one forward and one backward pass. `to_dense()` takes as many backward
    passes as a batch has outputs, or tangents of all parameters if these are fewer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> data = [(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)), (torch.ones(1, 2), torch.zeros(1, 1))]
        >>> J = JacobianLinearOperator(model, list(model.parameters()), data)
        >>> J.to_dense(), J.out_shapes
        (tensor([[3., 4., 1.],
            [1., 1., 1.]]), (torch.Size([2, 1]),))
    """

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        # The loss is never evaluated: a risk needs one.
        self._rows = _Stacked(
            type(self).__name__, model_func, nn.MSELoss(), params, data, progressbar, num_data, batch_size_fn,
            chunk_size, risk_options,
        )  # fmt: skip
        if check_deterministic:
            self._rows.check()

    def adjoint(self) -> LinearOperator:
        other = TransposedJacobianLinearOperator if not self._transposed else JacobianLinearOperator
        made = other.__new__(other)
        made._rows = self._rows
        return made


class TransposedJacobianLinearOperator(JacobianLinearOperator):
    """The transposed Jacobian `[P, N·C]`. Arguments as for `JacobianLinearOperator`, and the same conventions.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> data = [(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)), (torch.ones(1, 2), torch.zeros(1, 1))]
        >>> Jt = TransposedJacobianLinearOperator(model, list(model.parameters()), data)
        >>> Jt @ [torch.tensor([[1.0], [-1.0]])]
        [tensor([[2., 3.]]), tensor([0.])]
    """

    _transposed = True


class GGNFactorLinearOperator(_RowsOperator):
    """A factor `B [P, N·R·K]` of the generalized Gauss-Newton matrix, `B Bᵀ = GGN`, exact and matrix-free.

    `B = √c Jᵀ B_ℓ`, with a root `B_ℓ` of the Hessian of every loss term and the factor `c` of the loss's reduction
    over the whole data set. `B @ u` draws from N(0, GGN) if `u` is standard normal; `B.T @ v` has the squared norm
    `vᵀ GGN v`. Known as `multiply_ggn_factor` and `multiply_fisher_factor` (`B @ u`), and `..._transpose` (`B.T @ v`)
    in kfac_jax, whose loss classes give the same roots.

    For most losses GGN and Fisher are one matrix. Where they differ (a Gaussian with predicted variance), it is the
    Fisher matrix, as in `GGNLinearOperator`.

    What `B` multiplies is one tensor `[N, R, K]` in the order of the data: N examples, R loss terms of each, K columns
    of the root: C for cross-entropy, mean squared and binary cross-entropy. If R differs from batch to batch, it is a
    flat one, `[Σ N·R·K]`, batch after batch.

    Args:
        model_func, loss_func, params, data, progressbar, check_deterministic, num_data, batch_size_fn: As for
            `GGNLinearOperator`; the loss needs a likelihood.
        vectors: Which matrix. `Exact()`, the default: the GGN. `MonteCarlo(samples, seed)`: K is the number of
            samples, and `B Bᵀ` is the matrix of `FisherMCLinearOperator` with these draws.
            `Empirical(per_term=True)`: K = 1, the empirical Fisher over loss terms; `Empirical()`: R = K = 1, over
            examples. Words are taken as in `KFACLinearOperator`.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: If `vectors` are others, or the data are an iterator.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If the loss has no likelihood, or no root.

    Cost: `B @ u` is one forward and one backward pass, `B.T @ v` one forward pass with tangents. One pass over the
    data comes first, for their number.

    Source: Martens 2020, "New insights and perspectives on the natural gradient method", sections 8 and 9.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> B = GGNFactorLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> B.to_dense(), (B @ B.T).to_dense()  # 3 √2
        (tensor([[4.2426]]), tensor([[18.0000]]))
    """

    _transposed = True

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        vectors: Vectors | str | None = None,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        chosen = as_vectors(vectors)
        if not isinstance(chosen, (Exact, MonteCarlo, Empirical)) or (isinstance(chosen, Exact) and chosen.signs):
            raise ValueError(
                f"{type(self).__name__} has columns for each loss term; {chosen!r} has none. Take Exact(), "
                "MonteCarlo(samples, seed), Empirical() or Empirical(per_term=True)."
            )
        self._rows = rows = _RootStacked(
            type(self).__name__, model_func, loss_func, params, data, progressbar, num_data, batch_size_fn,
            chunk_size, risk_options,
        )  # fmt: skip
        rows.vectors = chosen
        if len(rows.risk.losses) > 1:
            raise UnsupportedError(
                f"{type(self).__name__} takes one loss, got losses for the outputs {rows.risk.losses.keys}. Make a "
                "factor of each with `output=`; the GGN of a weighted sum is the weighted sum of their GGNs."
            )
        chosen.check(rows.risk.losses[0].likelihood)  # refuse now, not at first use
        if check_deterministic:
            rows.check()
