"""Covariances of a model's outputs under normally distributed parameters.

With `Σ = L Lᵀ` and `φ_{n,c} = Lᵀ J_{n,c}` for example `n` and number `c` of its output, covariances
are products of these vectors. Where they come from depends on the layer:

* of layers whose numbers are the outputs there is a closed form, see `OutputLayer`;
* where the other layers return fewer numbers than the model, the Jacobians between are formed by
  columns: derivatives in the direction of each number that a layer returns;
* else by rows: a backward pass for each number of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

from curvlinops_plus.applications.attribution import Take, fill_unused, send_back
from curvlinops_plus.applications.output_layers import (
    Codes,
    OutputLayer,
    OutputPart,
    codes,
    output_parts,
)
from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.contexts import GradMode
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.example_lists import with_entries
from curvlinops_plus.layer.replay import held_parameters
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import BlockDiagonal, Diagonal, Kronecker, LinearOperator
from curvlinops_plus.linalg.pieces import rows_at_once
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, LayerBatch, Vectors
from curvlinops_plus.risk.batches import (
    Batch,
    are_in_lists,
    count_examples,
    gradients_of,
    mapped,
    on_device,
    read_example_of_rows,
    tensors_of,
)
from curvlinops_plus.risk.calls import Output
from curvlinops_plus.risk.function_reads import layers_of
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.losses import Losses
from curvlinops_plus.risk.preserve import preserve_state, quiet, untraced
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.risk import Checked

#: Of more outputs than these layers are looked for whose numbers they are; a column costs about as
#: much as three rows.
_FEW_OUTPUTS = 8
_ROWS_PER_COLUMN = 3
_COLUMN_BYTES = 2**24


class Spread(NamedTuple):
    """Of the outputs of some examples.

    Attributes:
        variances: [N, R, C].
        sums: Sums of the rows of the covariances within loss terms, [N, R, C], where they were
            asked for.
        covariances: Within loss terms, [N, R, C, C], where they were asked for.
    """

    variances: Tensor
    sums: Tensor | None = None
    covariances: Tensor | None = None

    @classmethod
    def of(cls, phis: list[Tensor], F: Tensor, needed: str) -> Spread:
        """From `φ` of each block, [N, R, C, k]: Cov(f_c, f_d) = J_cᵀ Σ J_d = Σ_blocks φ_c · φ_d."""
        zeros = torch.zeros_like(F)
        if needed == "covariances":
            covariances = sum([phi @ phi.mT for phi in phis], zeros[..., None])
            return cls(covariances.diagonal(dim1=-2, dim2=-1), None, covariances)
        variances = sum([phi.square().sum(-1) for phi in phis], zeros)
        sums = None
        if needed == "sums":
            sums = sum([(phi @ phi.sum(-2)[..., None])[..., 0] for phi in phis], zeros)
        return cls(variances, sums)

    def plus(self, layer: OutputLayer, F: Tensor) -> Spread:
        """With what an output layer adds."""
        if self.covariances is not None:
            covariances = self.covariances
            for phi in layer.projections(F):
                covariances = covariances + phi @ phi.mT
            return Spread(covariances.diagonal(dim1=-2, dim2=-1), None, covariances)
        variances = self.variances + layer.variances(F)
        return Spread(variances, None if self.sums is None else self.sums + layer.sums(F))


#: Takes the outputs `[N, R, C]` of a chunk, their spread, the shape in which the model returns
#: outputs, and its axis of C numbers where it is not the loss's own.
Then = Callable[[Tensor, Spread, torch.Size, int | None], tuple[Tensor, ...]]


@untraced
def output_covariance(
    K: Any,
    root: BlockDiagonal,
    picked: Tensor | None,
    X: Any,
    needed: str,
    max_bytes: int,
    then: Then,
) -> list[Tensor]:
    """`then` of the outputs for inputs `X` and their spread, chunk by chunk; its tensors are
    joined.

    Args:
        K: The curvature, which knows model and parameters.
        root: `L` with `L Lᵀ` the covariance of the parameters.
        picked: Positions of the parameters that this is about; None for all.
        X: What the model is called with. If it requires a gradient, results have one.
        needed: "variances", "sums" or "covariances", as `Spread` has them.
        max_bytes: Memory for derivatives of outputs: inputs are cut into chunks.

    Raises:
        ValueError: If there are no inputs.
    """
    inputs = _PredictedInputs(K, X)
    derivatives = _Derivatives(K, root, picked, inputs)
    results = []
    start = 0
    # The first example tells how much memory one takes; other inputs can't be cut.
    step = 1 if inputs.can_be_cut else inputs.N
    with preserve_state(K.risk.model, K.risk.data):
        while start < inputs.N:
            batch = inputs.batch(start, min(start + step, inputs.N))
            chunk = derivatives.chunk(batch, needed)
            results.append(then(chunk.F, chunk.spread, chunk.f_shape, chunk.axis))
            start += step
            step = max(1, max_bytes // (chunk.size_of_example + 1))
    return [torch.cat(parts) for parts in zip(*results)]


@untraced
def output_jacobians(K: Any, picked: Tensor | None, X: Any) -> tuple[Tensor, Tensor]:
    """Outputs [N, R, C] for inputs `X`, and their derivatives [N, R, C, P] by the parameters at the
    positions `picked`; if `X` requires a gradient, both have one.

    Raises:
        ValueError: If there are no inputs.
    """
    inputs = _PredictedInputs(K, X)
    with preserve_state(K.risk.model, K.risk.data):
        batch = inputs.batch(0, inputs.N)
        if inputs.require_grad:
            F, J, _, _ = inputs.differentiable(batch)
        else:
            F, _, _ = inputs.outputs(batch)
            J = inputs.jacobians(batch, F)
    return F, J if picked is None else J[..., picked]


class _PredictedInputs:
    """Inputs of a model without targets, what it makes of some of them, and derivatives.

    Attributes:
        X: The inputs, on the device of the model.
        N: Number of examples.
        can_be_cut: Whether examples can be told apart.
        risk: Model, parameters and layers.
        require_grad: Whether results have derivatives by the inputs.
    """

    def __init__(self, K: Any, X: Any) -> None:
        self.risk = _without_targets(K.risk)
        X = mapped(on_device, X, self.risk.device)
        # The model is called as `model(**X)` where the data's batches are mappings.
        self.unpack = isinstance(X, Mapping) and isinstance(next(iter(K.risk.data), None), Mapping)
        if self.unpack:
            X = {key: x for key, x in X.items() if key != "labels"}
        self.X = X
        options = self.risk.options
        self._rows = read_example_of_rows(X, options.example_of_rows, self.risk.device)
        self.N = count_examples(X, None, 0, options.batch_size_fn, self.unpack, self._rows)
        self._in_lists = are_in_lists(X, self.N, options.batch_size_fn)
        is_by_rows = isinstance(X, (Tensor, Mapping)) and not self._rows
        self.can_be_cut = self._in_lists or is_by_rows
        if not self.N:
            raise ValueError("There are no inputs to predict for.")
        tensors = tensors_of(X)
        self.require_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if self.require_grad and not isinstance(X, (Tensor, Mapping)):
            raise UnsupportedError(
                f"Predictions for a {type(X).__name__} that requires a gradient have none; give a "
                "tensor or a mapping of tensors with the examples on their first axes."
            )

    def batch(self, start: int, stop: int) -> Batch:
        """Examples `start` to `stop`; what has no axis of N examples is for all."""
        X = self.X
        if self._in_lists:
            X = with_entries(X, self.N, range(start, stop))
        elif self.can_be_cut and isinstance(X, Mapping):
            N = self.N
            X = {key: x[start:stop] if _is_by_example(x, N) else x for key, x in X.items()}
        elif self.can_be_cut:
            X = X[start:stop]
        y = self.risk.losses.joined([None])
        return Batch(
            X,
            y,
            stop - start,
            self.unpack,
            start,
            in_lists=self._in_lists,
            example_of_rows=self._rows,
        )

    def outputs(self, batch: Batch) -> tuple[Tensor, torch.Size, int | None]:
        """Outputs [N, R, C], their shape in the model, and the axis of their C numbers there."""
        with torch.inference_mode(False), GradMode(False):
            (f,), _, (axis,) = self.risk.run(batch)
        return self._canonical(f, batch.num_examples, axis), f.shape, axis

    def _canonical(self, f: Tensor, N: int, axis: int | None) -> Tensor:
        return self.risk.losses[0].require_likelihood().canonical(f, f, N, axis)[0]

    def jacobians(self, batch: Batch, F: Tensor) -> Tensor:
        """Derivatives [N, R, C, P] of outputs `F` by all parameters, by rows."""
        N, R, C = F.shape
        weights = LossWeights(self.risk)
        layers = layers_of(self.risk)
        parts, _ = send_back(
            self.risk, _Units(), weights, batch, layers, methodcaller("param_grads")
        )
        J = self.risk.space.flatten_rows(fill_unused(parts, self.risk, R * C, N))
        return J.view(R, C, N, -1).permute(2, 0, 1, 3)

    def differentiable(self, batch: Batch) -> tuple[Tensor, Tensor, torch.Size, int | None]:
        """Outputs [N, R, C], derivatives [N, R, C, P] by the parameters, with derivatives of both
        by the inputs; shape and axis of the outputs in the model.

        Each example is run by itself.
        """
        risk = self.risk
        params = {key: p.detach() for key, p in risk.params.items()}
        key_of = {id(p): key for key, p in risk.own_params.items()}
        held = held_parameters(risk.model).items()
        places = {name: key_of[id(p)] for name, p in held if id(p) in key_of}
        forms: list[Any] = []
        N = batch.num_examples

        def of_example(params: dict[str, Tensor], x: Any) -> tuple[Tensor, Tensor]:
            if isinstance(x, Mapping):
                x = {key: t[None] if key in by_example else t for key, t in x.items()}
            else:
                x = x[None]
            args, kwargs = ((), x) if batch.unpack else ((x,), {})
            tensors = {name: params[key] for name, key in places.items()}
            out = functional_call(risk.model, tensors, args, dict(kwargs), tie_weights=False)
            (f,), (axis,) = risk.losses.select(out, risk.options.output)
            forms.append((f.shape, axis))
            F = self._canonical(f, 1, axis)[0]
            return F, F

        X = batch.X
        by_example: set[str] = set()
        in_dims: Any = 0
        if isinstance(X, Mapping):
            by_example = {key for key, x in X.items() if _is_by_example(x, N)}
            in_dims = {key: 0 if key in by_example else None for key in X}
        with torch.inference_mode(False), GradMode(True), quiet():
            J, F = vmap(jacrev(of_example, has_aux=True), (None, in_dims))(params, X)
        shape, axis = forms[0]
        return F, risk.space.flatten_rows(J), torch.Size((shape[0] * N, *shape[1:])), axis


def _is_by_example(x: Any, N: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and len(x) == N


class _Chunk(NamedTuple):
    """Outputs [N, R, C] of some inputs and their spread, shape and axis of the outputs in the
    model, and bytes that an example took.
    """

    F: Tensor
    spread: Spread
    f_shape: torch.Size
    axis: int | None
    size_of_example: int


class _Derivatives:
    """Spreads of outputs: layer by layer, or from whole Jacobians where `root` is not of `K`'s
    blocks.
    """

    def __init__(
        self, K: Any, root: BlockDiagonal, picked: Tensor | None, inputs: _PredictedInputs
    ) -> None:
        self.root = root
        self.picked = picked
        self.inputs = inputs
        self.weights = LossWeights(inputs.risk)
        self.by_layer = picked is None and isinstance(K, BlockwiseLinearOperator)
        self.layers = [entry.layer for entry in K.plan] if self.by_layer else []
        #: `√(Λ (Q_Aᵀ a)²)` of layers that read one row of each example.
        self.lengths: dict[Layer, Tensor] = {}

    def chunk(self, batch: Batch, needed: str) -> _Chunk:
        """Outputs and spread for some inputs."""
        if self.inputs.require_grad:
            F, J, f_shape, axis = self.inputs.differentiable(batch)
            phis = [self._projected(J)]
            return _Chunk(F, Spread.of(phis, F, needed), f_shape, axis, _example_bytes(2 * phis, F))
        F, f_shape, axis = self.inputs.outputs(batch)
        if not self.by_layer:
            phis = [self._projected(self.inputs.jacobians(batch, F))]
            return _Chunk(F, Spread.of(phis, F, needed), f_shape, axis, _example_bytes(2 * phis, F))
        found = self._output_layers(batch, F, needed)
        others = [layer for layer in self.layers if layer not in found]
        phis = self._projections(batch, F, others) if others else []
        spread = Spread.of(phis, F, needed)
        for layer in found.values():
            spread = spread.plus(layer, F)
        numbers = [part.weights for layer in found.values() for part in layer.parts]
        if needed == "covariances":
            numbers.append(spread.covariances)  # type: ignore[arg-type]
        return _Chunk(F, spread, f_shape, axis, _example_bytes([*phis, *numbers], F))

    def _projected(self, J: Tensor) -> Tensor:
        """`φ` of whole Jacobians."""
        return _transposed_times(self.root, J if self.picked is None else J[..., self.picked])

    def _output_layers(self, batch: Batch, F: Tensor, needed: str) -> dict[Layer, OutputLayer]:
        """Layers whose numbers are entries of the outputs."""
        if F[0].numel() <= _FEW_OUTPUTS:
            return {}
        parts: dict[Layer, list[OutputPart] | None] = {}

        def take(layer_batch: LayerBatch) -> dict[Layer, Tensor]:
            layer = layer_batch.layer
            if layer_batch.first:
                parts[layer] = output_parts(layer_batch, self.root)
            return {} if parts[layer] is None else {layer: layer_batch.grads}

        risk = self.inputs.risk
        gradients, _ = send_back(risk, Codes(), self.weights, batch, self.layers, take)
        sent = codes(F[0].numel(), F)
        layers = {}
        for layer, g in gradients.items():
            of_layer = parts[layer]
            assert of_layer is not None
            layers[layer] = OutputLayer.of(of_layer, g, sent)
        fits = [layer.fits for layer in layers.values()]
        if needed != "variances":
            fits = [layer.fits & layer.has_whole_terms(F) for layer in layers.values()]
        are_known = torch.stack(fits).tolist() if fits else []
        return {layer: layers[layer] for layer, known in zip(layers, are_known) if known}

    def _projections(self, batch: Batch, F: Tensor, layers: list[Layer]) -> list[Tensor]:
        """`φ` of each block of some layers, [N, R, C, k]."""
        N, R, C = F.shape
        risk = self.inputs.risk
        self.lengths.clear()
        parts = None
        if R * C > _FEW_OUTPUTS:
            parts = _columns(risk, self.weights, batch, layers, self._of_layer)
        if parts is None:
            self.lengths.clear()
            parts, _ = send_back(risk, _Units(), self.weights, batch, [*layers], self._of_layer)
        return [phi.view(R, C, N, -1).permute(2, 0, 1, 3) for phi in parts.values()]

    def _of_layer(self, batch: LayerBatch) -> dict[str, Tensor]:
        """`φ` of each block of a layer, [V, N, k].

        Where a layer reads one row `a` for each example, and `L = (Q_G ⊗ Q_A) √Λ (Q_G ⊗ Q_A)ᵀ`,
        `φ` is up to a rotation `(Q_Gᵀ g) √(Λ (Q_Aᵀ a)²)`: as many numbers as the layer has outputs,
        not as it has parameters. The second factor is kept for the further vectors.
        """
        phis = {}
        for group in batch.layer.groups:
            part = batch.restrict(group)
            L: Any = self.root.blocks[group.name]
            basis = getattr(L, "basis", None)
            in_factors = isinstance(L, Diagonal) or isinstance(basis, Kronecker)
            is_plain = part.role is not None and part.weight and not part.sparse
            one_row = is_plain and len(part.calls) == 1 and part.grads.shape[2:-1] == (1,)
            if not (in_factors and one_row):
                phis[group.name] = _transposed_times(L, part.per_example_grads.flatten(2))
                continue
            g = part.grads[:, :, 0]
            if basis is not None:
                g = _transposed_times(basis.G, g)
            if batch.first:
                a: Any = part.inputs[:, 0]  # type: ignore[index]
                if basis is not None:
                    a = _transposed_times(basis.A, a)
                # L is Diagonal(√Λ) itself, or √Λ in the basis.
                roots = L.vector if isinstance(L, Diagonal) else L.values
                roots = roots.view(-1, a.shape[1])
                self.lengths[batch.layer] = (a.square() @ roots.square().T).sqrt()
            phis[group.name] = g * self.lengths[batch.layer]
        return phis


def _example_bytes(tensors: Sequence[Tensor], F: Tensor) -> int:
    """Bytes for one example where tensors are formed, and numbers of the same size from them."""
    return 2 * sum([t.nbytes for t in tensors], 2 * F.nbytes) // len(F)


def _transposed_times(L: LinearOperator, J: Tensor) -> Tensor:
    """`Lᵀ` times each row of J."""
    return (L.T @ J.flatten(0, -2).T).T.reshape(J.shape)


def _columns(
    risk: EmpiricalRisk, weights: LossWeights, batch: Batch, layers: list[Layer], take: Take
) -> dict[Any, Tensor] | None:
    """What `send_back` of unit vectors gives, from fewer derivatives: by each number that a layer
    returns.

    Gradients `g(u) = Jᵀu` at what layers return are linear in u, so `J e_k` is the gradient of
    `g_k` by u.

    Returns:
        None where layers return too many numbers, or the model can't be differentiated twice.
    """
    N = batch.num_examples
    parts: dict[Any, Tensor] = {}
    recorder = Recorder(risk, layers, _Units(), weights)
    with recorder.hooked():
        with recorder.recording(batch):
            (f,), _, (axis,) = risk.run(batch)
        back = recorder.backward_pass(lambda layer_batch: parts.update(take(layer_batch)))
        outputs = [output for call in recorder.last.calls for output in call.outputs]
        number = sum(output.shape.numel() for output in outputs) // N
        if not f.requires_grad or _ROWS_PER_COLUMN * number >= f.numel() // N:
            return None
        canonical = risk.losses[0].require_likelihood().canonical
        F, _ = canonical(f, f, N, axis)
        try:
            gradients = [_by_columns(f, F, output) for output in outputs]
        except (RuntimeError, NotImplementedError):  # an operation without second derivatives
            return None
        if any(g is None for g in gradients):
            return None
        back.show([*gradients], F[0].numel())
    return parts


def _by_columns(f: Tensor, F: Tensor, output: Output) -> Tensor | None:
    """Gradients at what a call has returned, for each number of `F` [N, R, C], the model's output
    `f` in canonical form: `[R·C, *shape]`. None if derivatives of the backward pass are wrong.
    """
    N, R, C = F.shape

    def of_examples(g: Tensor | None) -> Tensor:
        """A gradient as [N, m]."""
        return output.gradient(g, 1)[0].reshape(N, -1)

    u = torch.zeros_like(F, requires_grad=True)
    (g,) = gradients_of([F], [output.edge], [u], True, create_graph=True)
    numbers = of_examples(g)
    units = torch.eye(numbers.shape[1]).to(numbers)
    columns = [F.new_zeros(N, R, C, 0)]
    for some in units.split(rows_at_once(f.device, _COLUMN_BYTES, F.nbytes)):
        at_numbers = some[:, None].expand(-1, N, -1)
        if numbers.requires_grad:
            (J,) = torch.autograd.grad(
                numbers, u, at_numbers, retain_graph=True, is_grads_batched=True
            )
            columns.append(J.movedim(0, -1))
    J = torch.cat(columns, -1) if numbers.requires_grad else F.new_zeros(N, R, C, len(units))
    # As the gradient for a vector v is Σ v J.
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(F.shape, generator=generator, dtype=torch.float64).to(F)
    (g,) = gradients_of([F], [output.edge], [v], True)
    expected = of_examples(g)
    found = (v[..., None] * J).sum((1, 2))
    if not (found - expected).norm() <= torch.finfo(F.dtype).eps ** 0.5 * expected.norm():
        return None
    # Back to the order in which gradients arrive.
    places = torch.arange(output.shape.numel(), device=f.device).view(output.shape)
    raw = J.new_empty(R * C, output.shape.numel())
    raw[:, of_examples(places).flatten()] = J.permute(1, 2, 0, 3).reshape(R * C, -1)
    return raw.view(-1, *output.shape)


class _Units(Vectors):
    """A unit vector for each number of an example's output, the same for all examples."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return F.shape[1] * F.shape[2]

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        for r in range(F.shape[1]):
            for c in range(F.shape[2]):
                unit = torch.zeros_like(F)
                unit[:, r, c] = 1
                yield unit


def _without_targets(risk: EmpiricalRisk) -> EmpiricalRisk:
    """The same model, parameters and layers for inputs alone, in this process."""
    (reference,) = risk.losses
    loss = _Targetless(reference.require_likelihood().class_axis)
    losses: Any = loss
    if risk.losses.form == "dict":
        losses = {reference.key: loss}
    elif risk.losses.form == "tuple":
        losses = (loss,)
    targetless = copy(risk)
    targetless.losses = Losses(losses)
    targetless.checked = Checked()
    targetless.processes = Alone()
    targetless.options = replace(risk.options, mask=None, shift_labels=False, progressbar=False)
    return targetless


class _Targetless(Likelihood):
    """Outputs in the form in which a loss reads them, where there are no targets."""

    def __init__(self, class_axis: int) -> None:
        super().__init__(None, "sum")
        self.class_axis = class_axis

    def canonical(
        self, f: Tensor, y: Any, num_examples: int, class_axis: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().canonical(f, f, num_examples, class_axis)

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        return F

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return torch.zeros_like(F[..., 0])
