"""`Likelihood`: a loss of one batch, its Hessian with respect to the model's output, and random
vectors.

Shapes of all likelihoods: a batch has `N` examples, each with `R` loss terms (tokens, pixels) that
depend on `C` numbers of the output each:

* `F [N, R, C]` is the model's output, at least in float32,
* `Y [N, R, ...]` is the target: `[N, R]` class indices, `[N, R, C]` numbers, or what
  `canonical_target` returns,
* `H [C, C]` of each term is the Hessian of its un-reduced loss, `B [C, K]` a root of it, `B Bᵀ =
  H`. Where that Hessian is indefinite, or zero by the choice of the output, `H` is the Fisher
  matrix instead, and `no_ggn` gives the reason.

`canonical` and `restore` convert between these and a user's shapes. All other methods are about
un-reduced terms: `reduction` and `count`, the divisor of PyTorch's "mean", are applied to the whole
data set, not to a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.draws import normals
from curvlinops_plus.linalg.numerics import at_least_float32

# `uniform(N, ...)` returns float64 numbers in [0, 1), in optimizers float32. The example axis comes
# first: they are drawn example by example.
Uniform = Callable[..., Tensor]

_Maker = TypeVar("_Maker", bound=Callable[..., "Likelihood"])


class Likelihood(ABC):
    """Loss terms of one batch, their gradients, Hessians and Monte-Carlo vectors.

    A subclass defines `nll`. The rest follows by automatic differentiation, and may be overridden
    where a formula is faster. `nll[n, r]` may depend on `F[n, r]` and `Y[n, r]` only. Gradients
    flow through every method: pass a detached `F` where they are not wanted.

    Args:
        loss: The loss; its `reduction` is used, if it has one.
        reduction: "mean" or "sum", for a loss that has no attribute `reduction`. Default: "mean".

    Example:
        >>> class Huber(Likelihood):
        ...     def nll(self, F, Y):
        ...         return torch.nn.functional.huber_loss(F, Y, reduction="none").sum(-1)
        >>> F, Y = torch.tensor([[[0.0, 0.5]]]), torch.tensor([[[3.0, 0.0]]])
        >>> Huber().hessian_product(F, Y, torch.ones(1, 1, 2))
        tensor([[[0., 1.]]])
    """

    class_axis: int = -1
    """Axis of the output that holds the `C` numbers of a loss term."""

    loss_type: ClassVar[type | None] = None
    """PyTorch's loss class that this likelihood supports with every option, if any."""

    option_names: ClassVar[tuple[str, ...]] = ("reduction",)
    """Attributes of the loss that determine its value; `rebuild_loss` passes them to its
    constructor.
    """

    def __init__(self, loss: Any = None, reduction: str = "mean") -> None:
        self.loss = loss
        self._default_reduction = reduction
        for option in self.option_names:
            weights = getattr(loss, option, None)
            if isinstance(weights, Tensor) and not bool(weights.isfinite().all()):
                raise ValueError(
                    f"{self.name}({option}=...) has entries that are NaN or infinite, at "
                    f"{(~weights.isfinite()).nonzero().tolist()[:5]}; expected finite weights."
                )

    @property
    def name(self) -> str:
        """Name of the loss, for messages."""
        return type(self if self.loss is None else self.loss).__name__

    @property
    def reduction(self) -> str:
        """How PyTorch reduces the terms of this loss, "mean" or "sum"; anything else raises
        `UnsupportedError`.
        """
        reduction = getattr(self.loss, "reduction", self._default_reduction)
        if reduction not in ("mean", "sum"):
            raise UnsupportedError(
                f"{self.name}(reduction={reduction!r}) is no scalar loss, so it has no curvature; "
                'use "mean" or "sum".'
            )
        return reduction

    @property
    def no_ggn(self) -> str | None:
        """Why `H` is the Fisher matrix and not the Hessian of the loss, as the predicate of a
        sentence about the loss.

        None if `H` is the Hessian.
        """
        return None

    def options(self) -> dict[str, Any]:
        """Everything that determines the loss, as plain Python and tensors, for serialization.

        `rebuild_loss` constructs the loss from it, if the loss is one of PyTorch's that this
        package supports.

        Example:
            >>> from curvlinops_plus.likelihood import likelihood_of
            >>> likelihood_of(torch.nn.MSELoss(reduction="sum")).options()
            {'loss': 'MSELoss', 'reduction': 'sum'}
        """
        loss_class = type(self if self.loss is None else self.loss)
        options: dict[str, Any] = {"loss": f"{loss_class.__module__}.{loss_class.__qualname__}"}
        builtin = self.loss_type
        if (
            builtin is not None
            and issubclass(loss_class, builtin)
            and _MAKERS.get(builtin) is type(self)
        ):
            options["loss"] = builtin.__name__
        for name in self.option_names:
            option = getattr(self.loss, name, None)
            options[name] = option.detach().clone() if isinstance(option, Tensor) else option
        options["reduction"] = self.reduction
        return options

    # --------------------------------------------------------------------------------------- shapes

    def canonical(
        self, f: Tensor, y: Tensor, num_examples: int, class_axis: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and target of one batch as `F [N, R, C]` and `Y [N, R, ...]`.

        Args:
            f: Output [M, ...] of the model, with M = N or a multiple of it: positions of an example
                next to each other. Half precision is converted to float32.
            y: Target, in the shape that the loss expects beside `f`.
            num_examples: N.
            class_axis: Axis of `f` that holds the C numbers of a term. Default: the loss's own, 1
                for cross-entropy and the last one for all others. An output [M] is M terms of one
                number.

        Raises:
            TypeError: If the target is no tensor.
            ValueError: If shapes or values of output and target don't fit the loss or each other.

        Example:
            >>> from curvlinops_plus.likelihood import likelihood_of
            >>> cross_entropy = likelihood_of(torch.nn.CrossEntropyLoss())
            >>> F, Y = cross_entropy.canonical(
            ...     torch.zeros(2, 10, 4, 5), torch.zeros(2, 4, 5, dtype=torch.long), 2
            ... )
            >>> F.shape, Y.shape
            (torch.Size([2, 20, 10]), torch.Size([2, 20]))
        """
        if not isinstance(y, Tensor):
            raise TypeError(
                f"{self.name} needs a target that is a tensor, got a {type(y).__name__}. Batches "
                "must be (X, y) with a tensor y, or mappings with 'labels'; for several targets "
                "give losses in their structure."
            )
        if not f.is_floating_point():
            raise ValueError(
                f"{self.name} needs a floating-point output of the model, got {f.dtype} "
                f"{list(f.shape)}."
            )
        axis = self.class_axis if class_axis is None else class_axis
        if f.ndim == 0 or num_examples < 1 or f.shape[0] == 0 or f.shape[0] % num_examples:
            raise ValueError(
                f"the first axis of the output, of shape {list(f.shape)}, must hold the "
                f"{num_examples} examples (or a positive multiple: positions of one example next "
                "to each other)."
            )
        is_vector = f.ndim == 1 and axis in (0, -1)
        if not is_vector and not 1 <= (axis + f.ndim if axis < 0 else axis) < f.ndim:
            raise ValueError(
                f"{self.name}: axis {axis} of an output of shape {list(f.shape)} can't hold the "
                "numbers of a loss term; the output needs examples along axis 0 and such an axis "
                "beside it."
            )
        F = _as_terms(f, num_examples, axis % f.ndim)
        F = at_least_float32(F)
        return F, self.canonical_target(y, F, f.shape, axis % f.ndim)

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        """Target `Y [N, R, ...]` for the output `F`, which had the shape `f_shape` and class axis
        `class_axis`.

        The default expects one number per number of the output.
        """
        if y.shape != f_shape:
            raise ValueError(
                f"{self.name} needs a target of the output's shape {list(f_shape)}, got "
                f"{list(y.shape)}; nothing is broadcast silently, so reshape one of them."
            )
        return _as_terms(y, len(F), class_axis).to(F.dtype)

    def restore(
        self,
        v: Tensor,
        f_shape: torch.Size | tuple[int, ...],
        num_examples: int,
        class_axis: int | None = None,
    ) -> Tensor:
        """Vectors [*lead, N, R, C] in the output's own shape, [*lead, *f_shape]: the inverse of
        `canonical`.

        Example:
            >>> from curvlinops_plus.likelihood import likelihood_of
            >>> cross_entropy = likelihood_of(torch.nn.CrossEntropyLoss())
            >>> cross_entropy.restore(torch.zeros(7, 2, 20, 10), (2, 10, 4, 5), 2).shape
            torch.Size([7, 2, 10, 4, 5])
        """
        axis = (self.class_axis if class_axis is None else class_axis) % len(f_shape)
        lead = v.shape[:-3]
        if axis == len(f_shape) - 1:
            return v.reshape(*lead, *f_shape)
        moved = [d for i, d in enumerate(f_shape) if i != axis] + [f_shape[axis]]
        return v.reshape(*lead, *moved).movedim(-1, len(lead) + axis)

    # ------------------------------------------------------------------------------------- the loss

    @abstractmethod
    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        """Un-reduced loss [N, R] of each term, with every option of the loss."""

    def count(self, F: Tensor, Y: Tensor) -> Tensor:
        """Divisor of PyTorch's "mean" for the terms of this batch, a 0-d float64 tensor; may be 0.

        The default counts every number of the output.
        """
        return count_tensor(F.numel(), F.device)

    def counts(self, F: Tensor, Y: Tensor) -> Tensor:
        """`count` of each example by itself [N], for examples with weights.

        Cost of the default: a call of `count` for each example, if that is not its default.
        """
        if type(self).count is Likelihood.count:
            return count_tensor(F[:1].numel(), F.device).expand(len(F))
        return torch.stack([self.count(F[n : n + 1], Y[n : n + 1]) for n in range(len(F))])

    def grad(self, F: Tensor, Y: Tensor) -> Tensor:
        """Gradient [N, R, C] of each un-reduced term. Cost of the default: one backward pass
        through `nll`.
        """
        return torch.func.grad(lambda F: self.nll(F, Y).sum())(F)

    # ---------------------------------------------------------------------------------- its Hessian

    def scale(self, F: Tensor, Y: Tensor) -> Tensor:
        """`h [N, R, 1 or C]`, the factor by which options and target multiply the Hessian of the
        plain loss.
        """
        return torch.ones_like(F[..., :1])

    def hessian_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        """Hessian of each term times vectors: V [*lead, N, R, C] -> [*lead, N, R, C].

        Cost of the default: two backward passes through `nll` per vector, batched.
        """
        return hessian_products(lambda F: self.nll(F, Y).sum(), F, V)

    def num_columns(self, F: Tensor) -> int:
        """Number K of columns of `hessian_root`."""
        return F.shape[-1]

    def hessian_root(self, F: Tensor, Y: Tensor) -> Tensor:
        """Columns [K, N, R, C] of a root of each term's Hessian: `H = Σ_k b_k b_kᵀ`.

        The default forms the Hessian [N, R, C, C] of every term and its eigendecomposition;
        `hessian_root_columns` yields one column at a time. The result may be a view that must not
        be written to. Negative eigenvalues are treated as rounding errors, and set to zero, down to
        `-√eps` of the largest magnitude in the batch.

        Raises:
            UnsupportedError: If the Hessian has eigenvalues below that: the loss is not convex in
                the output and no root exists.
        """
        C = F.shape[-1]
        basis = torch.eye(C, dtype=F.dtype, device=F.device)[:, None, None].expand(C, *F.shape)
        H = self.hessian_product(F, Y, basis).permute(1, 2, 0, 3)  # [N, R, C, C]
        eigenvalues, Q = torch.linalg.eigh((H + H.mT) / 2)
        eps = torch.finfo(F.dtype).eps
        lowest = eigenvalues.min()
        largest = eigenvalues.abs().max()
        if lowest < -(eps**0.5 * largest + C * eps):
            raise UnsupportedError(
                f"the Hessian of {self.name} with respect to the model's output has the eigenvalue "
                f"{lowest.item():.3g} (largest: {largest.item():.3g}): the loss is not convex "
                "there, so its Hessian has no root. Use an empirical Fisher, the Hessian itself, "
                "or register a likelihood that returns a root of the Fisher."
            )
        return (Q * eigenvalues.clamp(min=0).sqrt()[..., None, :]).permute(3, 0, 1, 2)

    def hessian_root_columns(self, F: Tensor, Y: Tensor) -> Iterator[Tensor]:
        """Columns [N, R, C] of `hessian_root`, one after the other.

        The default forms all of them at once. Override it where a column has a formula.
        """
        yield from self.hessian_root(F, Y)

    def hessian_root_product(self, F: Tensor, Y: Tensor, U: Tensor) -> Tensor:
        """Root of each term's Hessian times vectors, `B u`: U [*lead, N, R, K] -> [*lead, N, R, C].

        Cost of the default: the columns of the root, one at a time where they have a formula.

        Example:
            >>> from curvlinops_plus.likelihood import likelihood_of
            >>> mse = likelihood_of(torch.nn.MSELoss())
            >>> F = Y = torch.zeros(1, 1, 2)
            >>> mse.hessian_root_product(F, Y, torch.ones(1, 1, 2))
            tensor([[[1.4142, 1.4142]]])
        """
        total = torch.zeros(*U.shape[:-1], F.shape[-1], dtype=F.dtype, device=F.device)
        for k, column in enumerate(self.hessian_root_columns(F, Y)):
            total = total + U[..., k : k + 1] * column
        return total

    def hessian_root_transpose_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        """Transposed root of each term's Hessian times vectors, `Bᵀ v`: V [*lead, N, R, C] ->
        [*lead, N, R, K].

        Cost of the default: the columns of the root, one at a time where they have a formula.

        Example:
            >>> from curvlinops_plus.likelihood import likelihood_of
            >>> cross_entropy = likelihood_of(torch.nn.CrossEntropyLoss())
            >>> F, Y = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[1]])
            >>> v = torch.tensor([[[1.0, 0.0]]])
            >>> Bt_v = cross_entropy.hessian_root_transpose_product(F, Y, v)
            >>> cross_entropy.hessian_root_product(F, Y, Bt_v)  # B Bᵀ v = H v
            tensor([[[ 0.2500, -0.2500]]])
        """
        return torch.stack([(column * V).sum(-1) for column in self.hessian_root_columns(F, Y)], -1)

    # ------------------------------------------------------------------------------- random vectors

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        """Independent random vectors v [num, N, R, C] with `E[v vᵀ] = H` for each term.

        Args:
            F: Output.
            Y: Target.
            num: How many for each term. No factor 1/√num is applied.
            uniform: `uniform(N, ...)` returns float64 numbers in [0, 1), in optimizers float32. It
                is called with the example axis first, so that splitting a batch doesn't change the
                draws for a data set.

        The default is a root of the Hessian times standard normal numbers.
        """
        noise = normals(uniform(*F.shape[:2], num, self.num_columns(F))).to(F)
        return self.hessian_root_product(F, Y, noise.permute(2, 0, 1, 3))


def any_is(wrong: Tensor, name: str) -> bool:
    """Whether any entry is True, which a loss of this name refuses.

    A compiled function can't branch by what a tensor holds: it stops with an error, see
    `exact/compiled.py`, and who called it computes eagerly.
    """
    if not torch.compiler.is_compiling():
        return bool(wrong.any())
    message = f"{name} refuses an output or a target"
    torch._assert_async(~wrong.detach().any(), message)  # pyright: ignore[reportPrivateImportUsage]
    return False


def count_tensor(value: float, device: torch.device) -> Tensor:
    """A number as a 0-d tensor, created on the device without a copy or synchronization."""
    return torch.full((), value, dtype=torch.float64, device=device)


class OfExamples(Likelihood):
    """Any loss without a likelihood as a sum over examples, all that an empirical Fisher needs: one
    term for each.

    An example's loss is what the loss returns for the example alone, so that "mean" is the mean of
    these. The target `Y` is the batch's, with the shape of the output. It may be a tuple, list or
    mapping of tensors, as of labels and their weights.

    Example:
        >>> loss = OfExamples(torch.nn.SmoothL1Loss())
        >>> F, Y = loss.canonical(torch.tensor([[0.0, 2.0]]), torch.zeros(1, 2), 1)
        >>> loss.grad(F, Y)
        tensor([[[0.0000, 0.5000]]])
    """

    @property
    def reduction(self) -> str:
        # nn.KLDivLoss: the sum over the batch, divided by the number of its examples.
        is_mean = getattr(self.loss, "reduction", None) == "batchmean"
        return "mean" if is_mean else super().reduction

    def canonical(self, f: Tensor, y: Any, num_examples: int, class_axis: int | None = None) -> Any:
        return f.reshape(num_examples, 1, -1), (y, f.shape)

    def restore(
        self, v: Tensor, f_shape: Any, num_examples: int, class_axis: int | None = None
    ) -> Tensor:
        return v.reshape(*v.shape[:-3], *f_shape)

    def nll(self, F: Tensor, Y: Any) -> Tensor:
        """The loss of each example [N, 1]. Cost: a call of the loss for each."""
        y, f_shape = Y
        outputs = F.reshape(f_shape).split(f_shape[0] // len(F))
        parts = zip(outputs, _targets_by_example(y, len(F)), strict=True)
        return torch.stack([self.loss(*part) for part in parts]).view(-1, 1)

    def count(self, F: Tensor, Y: Any) -> Tensor:
        return count_tensor(len(F), F.device)

    def counts(self, F: Tensor, Y: Any) -> Tensor:
        return count_tensor(1, F.device).expand(len(F))

    def grad(self, F: Tensor, Y: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return super().grad(F, Y)
        with GradMode(True):
            F = F.detach().requires_grad_()
            return torch.autograd.grad(self.nll(F, Y).sum(), F)[0]


def _targets_by_example(y: Any, N: int) -> Sequence[Any]:
    """The target of each of N examples: rows of tensors, or entries of a list of one for each."""
    if isinstance(y, Tensor):
        is_shared = not y.ndim or len(y) == 1
        return [y] * N if is_shared else y.split(len(y) // N)
    if isinstance(y, Mapping):
        by_key = {key: _targets_by_example(part, N) for key, part in y.items()}
        return [{key: parts[n] for key, parts in by_key.items()} for n in range(N)]
    if not isinstance(y, (tuple, list)):
        return [y] * N
    if len(y) == N and not all(isinstance(part, Tensor) and part.shape[:1] == (N,) for part in y):
        return [[part] for part in y]
    by_place = zip(*[_targets_by_example(part, N) for part in y], strict=True)
    make = getattr(type(y), "_make", type(y))  # of named tuples
    return [make(parts) for parts in by_place]


def hessian_products(function: Callable[[Tensor], Tensor], F: Tensor, V: Tensor) -> Tensor:
    """Second derivative of a scalar function of `F` times vectors [*lead, *F.shape], batched with
    `vmap`.
    """
    pull = torch.func.vjp(torch.func.grad(function), F)[1]
    return torch.func.vmap(lambda v: pull(v)[0])(V.reshape(-1, *F.shape)).reshape(V.shape)


def _as_terms(t: Tensor, num_examples: int, axis: int) -> Tensor:
    """A tensor [M, ...] with class axis `axis` as [N, R, C]."""
    if 1 < t.ndim != axis + 1:
        t = t.movedim(axis, -1)
    return t.reshape(num_examples, -1, 1 if t.ndim == 1 else t.shape[-1])


_MAKERS: dict[type, Callable[[Any], Likelihood]] = {}


def register_likelihood(loss_type: type) -> Callable[[_Maker], _Maker]:
    """Decorator that registers a loss: of a `Likelihood` class, or of a function `loss ->
    Likelihood`.

    Subclasses of the loss are included, unless they have a `forward` of their own.

    Args:
        loss_type: Class of the loss. An existing entry is replaced.

    Example:
        >>> from curvlinops_plus.likelihood import FromDistribution
        >>> class MyPoissonLoss(torch.nn.PoissonNLLLoss):
        ...     pass
        >>> @register_likelihood(MyPoissonLoss)
        ... def _(loss):
        ...     return FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))
        >>> likelihood_of(MyPoissonLoss(reduction="sum")).reduction
        'sum'
    """
    if not isinstance(loss_type, type):
        raise TypeError(f"register_likelihood expects the class of a loss, got {loss_type!r}.")

    def register(make: _Maker) -> _Maker:
        _MAKERS[loss_type] = make
        return make

    return register


def likelihood_of(loss: Any) -> Likelihood:
    """The likelihood of a loss.

    Args:
        loss: A loss whose class, or a base class with the same `forward`, is registered. A
            `Likelihood` is returned unchanged.

    Raises:
        UnsupportedError: If nothing is registered for the loss, or its reduction is neither "mean"
            nor "sum".

    Example:
        >>> type(likelihood_of(torch.nn.CrossEntropyLoss())).__name__
        'CrossEntropy'
    """
    if isinstance(loss, Likelihood):
        likelihood = loss
    elif has_likelihood(loss):
        likelihood = _MAKERS[_registered_class(loss)](loss)
        if likelihood.loss is None:
            likelihood.loss = loss
    else:
        raise UnsupportedError(_why_unknown(loss))
    _ = likelihood.reduction  # raises here if the loss is not reduced
    return likelihood


def has_likelihood(loss: Any) -> bool:
    """Whether a likelihood is registered for the class of this loss; it may still refuse one of its
    options.

    Example:
        >>> has_likelihood(torch.nn.MSELoss()), has_likelihood(torch.nn.HuberLoss())
        (True, False)
    """
    if isinstance(loss, Likelihood):
        return True
    parent = _registered_class(loss)
    attributes = getattr(loss, "__dict__", {})
    if parent is None or "forward" in attributes:
        return False
    for method in ("forward", "__call__"):
        if getattr(type(loss), method, None) is not getattr(parent, method, None):
            return False
    # Hooks may change what the loss returns; those with an attribute `only_reads` are this
    # package's own, and change nothing.
    hooks: list[Any] = []
    for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        hooks += attributes.get(table, {}).values()
    return all(hasattr(hook, "only_reads") for hook in hooks)


def rebuild_loss(options: Mapping[str, Any]) -> nn.Module:
    """The loss that `Likelihood.options()` describes.

    Raises:
        UnsupportedError: If the loss is not one of the supported losses of PyTorch.

    Example:
        >>> from curvlinops_plus.likelihood import likelihood_of
        >>> options = likelihood_of(nn.CrossEntropyLoss(label_smoothing=0.1)).options()
        >>> rebuild_loss(options).label_smoothing
        0.1
    """
    kind = getattr(nn, options["loss"], None)
    if kind not in _MAKERS:
        raise UnsupportedError(
            f"the loss {options['loss']} can't be rebuilt from saved options, as those of torch.nn "
            "that have a likelihood can."
        )
    return kind(**{option: value for option, value in options.items() if option != "loss"})


def _registered_class(loss: Any) -> Any:
    """The nearest registered class that the loss is an instance of, or None."""
    return next((parent for parent in type(loss).__mro__ if parent in _MAKERS), None)


def _why_unknown(loss: Any) -> str:
    """Why a loss has no likelihood, and what to use instead."""
    name = getattr(loss, "__name__", type(loss).__name__)
    parent = _registered_class(loss)
    why = ""
    if parent is not None:
        why = (
            f" It changes the forward of {parent.__name__}, or has hooks, which may change its "
            "value."
        )
    elif isinstance(loss, (nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)):
        why = (
            " It has no curvature far from the target; a distribution has, as "
            "torch.distributions.Laplace(f, 1.0)."
        )
    elif not isinstance(loss, nn.Module):
        why = (
            " Losses are known by their class, which holds the options: pass the module, as "
            "nn.CrossEntropyLoss()."
        )
    return (
        f"no likelihood is registered for the loss {name}.{why} GGN, Hessian and Empirical() take "
        f"any function. Known losses: {', '.join(sorted(t.__name__ for t in _MAKERS))}. To add "
        "yours (a class), say which distribution it is the negative log-likelihood of:\n\n    "
        f"@register_likelihood({name if isinstance(loss, nn.Module) else 'MyLoss'})\n    def "
        "_(loss):\n        return FromDistribution(lambda f: "
        "torch.distributions.Poisson(f.exp()))\n\nor decorate a subclass of Likelihood, which "
        "needs one method, nll."
    )
