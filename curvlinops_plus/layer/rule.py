"""`LayerRule` and `AffineRule`: derivatives with respect to the parameters of one layer.

A rule computes derivatives with respect to a layer's parameters from the layer's recorded inputs
and the gradients of its output. `LayerRule` gives per-example gradients of any module. `AffineRule`
is for layers whose output is `W a + b`, which have Kronecker factors: a subclass defines three
methods and inherits the rest.

Shapes of all layer rules:

    x   [B, *in]        the layer's input, B examples in dimension 0
    g   [V, B, *out]    gradients of the layer's output for V vectors backpropagated
    a   [B, S, i]       rows that W multiplies, at S positions that share W;
                        without a column of ones for the bias
    J   [V, B, *shape]  per-example gradients of one parameter

Half-precision inputs and gradients are converted to float32 before they are multiplied or summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.kept import CallStart
from curvlinops_plus.layer.replay import Call, differentiable_parameters
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.linalg.gram_sum import gram
from curvlinops_plus.linalg.layout import Pattern
from curvlinops_plus.linalg.numerics import at_least_float32


class LayerRule:
    """Per-example gradients of any module that treats its examples (dimension 0) independently.

    This is the rule of every layer that has no other: it runs the module again for each example.
    Register a subclass with `register_rule` for a layer whose gradients have a cheaper formula.

    Attributes:
        max_bytes: Work memory that one call of `per_example_grads` aims at, on top of its result
            (default 64 MiB).

    Example:
        >>> rule, layer = LayerRule(), nn.PReLU()
        >>> rule.patterns(layer)
        {'weight': 'd0 -> 1 (d0)'}
        >>> g = torch.ones(1, 2, 3)
        >>> x = torch.tensor([[-1.0, 2, -3], [4, 5, -6]])
        >>> rule.per_example_grads(layer, (x,), {}, g)["weight"]
        tensor([[[-4.],
                 [-6.]]])
    """

    max_bytes: int = 64 * 2**20

    #: How a call is repeated for single examples.
    call_type: ClassVar[type[Call]] = Call

    #: Names in the module of the parameters that `replay` is about; None for the module's own.
    names: tuple[str, ...] | None = None

    #: Whether positions come after the channels in the output, `[B, C, *positions]`, rather than
    #: `[B, T, ...]`. None: either, as the mask's size tells.
    channels_first: ClassVar[bool | None] = False

    #: Whether `inputs` of an affine rule returns `SparseRows`.
    sparse: ClassVar[bool] = False

    #: Whether the parameter is a stack of matrices, of which each row of a call meets one.
    stacked: ClassVar[bool] = False

    def refuses(self, module: nn.Module) -> str | None:
        """The reason why this rule does not apply to a module of the registered type, or None if it
        applies.

        The module then gets the generic rule. Override it for options of a layer that the rule
        cannot express.
        """
        return None

    def check(self, module: nn.Module) -> None:
        """Check a module before its first forward pass.

        Raises:
            UnsupportedError: If its curvature would be wrong with any rule.
        """
        return None

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """Einops pattern of each direct parameter, by local name, that makes it columns of the
        layer's one matrix.

        The default is a matrix with one row that holds all parameters side by side.
        """
        return {name: flat_pattern(p.ndim) for name, p in differentiable_parameters(module).items()}

    def sizes(self, module: nn.Module) -> dict[str, int]:
        """Sizes of axes that `patterns` split a parameter's axis into, e.g. `{"g": 4}` for `"(g o)
        i -> g o i"`.
        """
        return {}

    def parts(self, module: nn.Module) -> list[Any]:
        """Parameters that are read by function calls inside the module's forward (see `Part`)."""
        return []

    def axes(
        self, module: nn.Module, axis: int, leaves: Sequence[Tensor], inputs: bool
    ) -> list[int]:
        """The axis that carries the examples, for each tensor among the inputs or outputs of a
        call.

        Args:
            module: The layer.
            axis: The axis in the model around this layer: 0, or 1 in `batch_first=False` modules.
            leaves: The tensors, in the order of PyTorch's pytrees (of outputs: the floating-point
                ones).
            inputs: Whether they are the inputs.
        """
        return [axis] * len(leaves)

    def masked(self, g: Tensor, mask: Tensor | None) -> Tensor:  # [V, B, *out] -> [V, B, *out]
        """Output gradients that are zero where a mask [N, T] says that a position does not count.

        Outputs with T positions are `[B, T, ...]` with at least one more axis, or `[B, C,
        *positions]` in layers with channels first. Other outputs are returned unchanged.
        """
        if mask is None or g.ndim < 4:
            return g
        N, T = mask.shape
        channels_first = self.channels_first
        if channels_first is None:
            channels_first = g.shape[2] != T
        positions = g.shape[3:] if channels_first else g.shape[2:3]
        if g.shape[1] != N or positions.numel() != T:
            return g
        channels = [1] * (g.ndim - 2 - len(positions))
        if channels_first:
            return g * mask.view(N, *channels, *positions)
        return g * mask.view(N, *positions, *channels)

    @property
    def replays(self) -> bool:
        """Whether it runs modules again, rather than having a formula."""
        return type(self).per_example_grads is LayerRule.per_example_grads

    def replay(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        g: Tensor | Sequence[Tensor],
        in_axes: Sequence[int | None] | None = None,
        out_axes: Sequence[int] | None = None,
        start: CallStart | None = None,
    ) -> dict[str, Tensor]:
        """Run the module again for each example: `per_example_grads` of layers without a formula.

        Args:
            module, args, kwargs, g: As for `per_example_grads`.
            in_axes: Axis of the examples in the module itself, for each tensor of the inputs; None
                for one that all examples share. Default: `axes` says it.
            out_axes: The same for each floating-point tensor of the output.
            start: What the module held when the call began, if it is to begin with the same.
        """
        g = [g] if isinstance(g, Tensor) else g
        if in_axes is None:
            tensors = [t for t in tree_leaves((tuple(args), dict(kwargs))) if isinstance(t, Tensor)]
            in_axes = self.axes(module, 0, tensors, inputs=True)
        if out_axes is None:
            out_axes = self.axes(module, 0, g, inputs=False)
        num_examples = g[0].shape[1]
        call = self.call_type(
            module, args, kwargs, num_examples, in_axes, out_axes, self.names, start
        )
        return call.per_example_grads(g, self.max_bytes)

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Any
    ) -> dict[str, Tensor]:  # g: [V, B, *out] -> {name: [V, B, *shape]}
        """Gradients of each example for the module's direct parameters, for V vectors at the
        output.

        The module may have any inputs and parameters (frozen ones too), may contain other modules,
        and is not changed. It is run with one example at a time, under `torch.func.vmap` if
        possible, else in a plain loop (V·B backward passes; for modules with in-place writes,
        control flow or operations that vmap does not support).

        Args:
            module: The layer.
            args: Positional inputs of its call: tensors whose dimension 0 has size B hold one entry
                per example (also inside tuples, lists and dicts), everything else is the same for
                all examples.
            kwargs: Keyword inputs of its call, likewise.
            g: Gradients of the output, `[V, B, *out]`; of a module that returns several tensors a
                list of them, one for each floating-point tensor in the order of PyTorch's pytrees.

        Returns:
            Local name of each direct parameter to gradients `[V, B, *shape]`, in float32 at least.

        Raises:
            UnsupportedError: If the module mixes examples or draws random numbers.
            ValueError: If the output of one example does not fit its gradient.
        """
        return self.replay(module, args, kwargs, g)

    def example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Any, *call: Any
    ) -> dict[str, Tensor]:  # g: [V, B, *out] -> {name: [V, B, *shape]}
        """`per_example_grads` of a recorded call.

        Its module may have the examples on other axes, or begin with other buffers, which `replay`
        takes. A rule with a formula of its own needs none: its tensors have the examples first,
        whatever the module.
        """
        if self.replays:
            return self.replay(module, args, kwargs, g, *call)
        return self.per_example_grads(module, args, kwargs, g)


class AffineRule(LayerRule):
    """Rule of a layer whose output is `W a` or `W a + b`: define three methods, inherit the rest.

    `patterns` names the weight, with the pattern that turns it into the matrix `W [o, i]`, and
    after it `"bias"` with the pattern `"o -> o 1"` if the layer has one. `inputs` gives the rows
    `a` and `grads` the rows of the output gradient. The other methods follow; override them where a
    layer can do it faster.

    Two variants exist. A layer of `b` matrices has patterns with a batch axis, whose size `sizes`
    returns, and rows and gradients with one more axis. A layer with mostly zero rows returns
    `SparseRows` and sets `sparse`: its input factor is stored as a diagonal.

    Attributes:
        sparse: Whether `inputs` returns `SparseRows`.

    Example:
        >>> class Transposed(nn.Module):  # y = x @ kernel, kernel [i, o]
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = nn.Parameter(torch.ones(3, 2))
        ...
        ...     def forward(self, x):
        ...         return x @ self.kernel
        >>> from curvlinops_plus.layer import register_rule, rule_of
        >>> @register_rule(Transposed)
        ... class TransposedRule(AffineRule):
        ...     def patterns(self, module):
        ...         return {"kernel": "i o -> o i"}
        ...
        ...     def inputs(self, module, x):
        ...         return x[:, None]
        ...
        ...     def grads(self, module, g):
        ...         return g[:, :, None]
        >>> layer, x, g = Transposed(), torch.ones(5, 3), torch.ones(1, 5, 2)
        >>> rule_of(layer).per_example_grads(layer, (x,), {}, g)["kernel"].shape
        torch.Size([1, 5, 3, 2])
    """

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """The weight's pattern, e.g. `"o i -> o i"`, then `"bias": "o -> o 1"` if the layer has a
        bias.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define patterns(module), e.g. {{'W': 'o i -> o i'}}."
        )

    def lacks_examples(self, module: nn.Module, x: Tensor) -> bool:
        """Whether an input has no axis of examples, as that of a batch of one may have lost it."""
        return False

    def inputs(
        self, module: nn.Module, x: Tensor
    ) -> Tensor | SparseRows:  # [B, *in] -> [B, S, *b, i]
        """The rows that the weight is multiplied with, without a column of ones."""
        raise NotImplementedError(
            f"{type(self).__name__} must define inputs(module, x), [B, *in] -> [B, S, i]."
        )

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *out] -> [V, B, S, *b, o]
        """The output gradient, one row for each row of `inputs`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define grads(module, g), [V, B, *out] -> [V, B, S, o]."
        )

    def at(self, rows: slice, total: int) -> AffineRule:
        """The rule of a function call that reads only some rows of the weight (see `Part`).

        Raises:
            UnsupportedError: If there is none.
        """
        if rows.stop - rows.start != total:
            raise UnsupportedError(
                f"A call reads rows {rows.start}:{rows.stop} of a weight with {total} rows; "
                f"{type(self).__name__} needs all of them."
            )
        return self

    def reads(self, module: nn.Module) -> Tensor | None:
        """Which of the `b` matrices a call reads, `[b]` of zeros and ones; None for all."""
        return None

    def input_of(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The `x` among the inputs of a call: the first positional input, or else the first
        keyword.

        A layer of several inputs concatenates them into one tensor, examples first. Called with
        that tensor alone, it returns it unchanged.

        Raises:
            ValueError: If that is not a tensor.
        """
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{type(self).__name__} expects a tensor as first input of the layer, got "
                f"{type(x).__name__}. Override `input_of` if the layer takes its input elsewhere."
            )
        return x

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Sum of `a aᵀ` over all rows [*b, i, i], in memory of its own; sum of `a` [*b, i], and the
        number of rows B·S.

        Of sparse rows only the diagonal [i] of the first, and the number of rows that are kept.
        """
        a = self.rows(module, x)
        if isinstance(a, SparseRows):
            return a.square_sum(), a.sum(), a.count()
        a = a.flatten(0, 1)
        return gram(a), a.sum(0), float(len(a))

    def mean_inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *in] -> [B, *b, i]
        """Mean of `a` over the positions of each example."""
        a = self.rows(module, x)
        assert isinstance(a, Tensor), "the mean of sparse rows is not formed"
        return a.mean(1)

    def grad_gram(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *out] -> [*b, o, o]
        """Sum of `g gᵀ` over all V·B·S rows."""
        return gram(self.grad_rows(module, g).flatten(0, 2))

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B, *out] -> {name: [V, B, *shape]}
        """Gradients of each example, `Σ_s g aᵀ` for the weight and `Σ_s g` for the bias; see
        `LayerRule`.

        Raises:
            ValueError: If inputs and gradients do not fit together.
        """
        # J = Σ_s g_s a_sᵀ
        a = self.rows(module, self.input_of(module, args, kwargs))
        rows = self.grad_rows(module, g)
        b = rows.shape[3:-1] if isinstance(a, SparseRows) else a.shape[2:-1]
        if (*a.shape[:2], *b) != rows.shape[1:-1]:
            raise ValueError(
                f"{type(self).__name__}: inputs are {list(a.shape)}, expected [B, S, *b, i], and "
                f"gradients {list(rows.shape)}, expected [V, B, S, *b, o] with the same examples, "
                "positions and matrices."
            )
        return self.split(module, outer_products(rows, a), rows)

    def rows(
        self, module: nn.Module, x: Tensor
    ) -> Tensor | SparseRows:  # [B, *in] -> [B, S, *b, i]
        """`inputs` in at least float32."""
        a = self.inputs(module, at_least_float32(x))
        return a if isinstance(a, SparseRows) else at_least_float32(a)

    def grad_rows(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *out] -> [V, B, S, *b, o]
        """`grads` in at least float32."""
        return at_least_float32(self.grads(module, at_least_float32(g)))

    def split(self, module: nn.Module, J: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Split the columns of `J [V, B, *b, o, i]` into parameters, and sum gradient rows for the
        bias.

        Raises:
            ValueError: If the columns are not those of the parameters.
        """
        gradients = {}
        sizes = self.sizes(module)
        start = 0
        for name, text in self.patterns(module).items():
            pattern = Pattern(text)
            shape = getattr(module, name).shape
            if name == "bias":
                # It multiplies a column of ones, which is not stored.
                M = rows.sum(2)[..., None]
            else:
                width = prod(shape) // prod(J.shape[2:-1])
                M = J[..., start : start + width]
                start += width
            axes = pattern.sizes(shape, sizes)
            to_parameter = f"... {pattern.matrix} -> ... {pattern.parameter}"
            gradients[name] = rearrange(M, to_parameter, **axes)
        if start != J.shape[-1]:
            raise ValueError(
                f"{type(self).__name__}: inputs(...) has {J.shape[-1]} columns, but the parameters "
                f"of patterns(...) without the bias have {start}."
            )
        return gradients


class EnclosedRule(LayerRule):
    """Per-example gradients of parameters inside a module, its own or its children's, by running
    all of it again.

    Args:
        names: Their names in the module.

    Example:
        >>> module, g = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.ones(1, 4, 2)
        >>> rule = EnclosedRule(("0.weight",))
        >>> {
        ...     name: tuple(J.shape)
        ...     for name, J in rule.per_example_grads(module, (torch.ones(4, 3),), {}, g).items()
        ... }
        {'0.weight': (1, 4, 2, 3)}
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """All parameters side by side in one row."""
        named = dict(module.named_parameters(remove_duplicate=False))
        return {name: flat_pattern(named[name].ndim) for name in self.names or ()}


GENERIC = LayerRule()


def flat_pattern(ndim: int) -> str:
    """Pattern of a parameter of which nothing is known but that it is a vector of numbers."""
    axes = " ".join(f"d{k}" for k in range(ndim))
    return f"{axes} -> 1 ({axes})" if ndim else "-> 1 1"


def outer_products(
    g: Tensor, a: Tensor | SparseRows
) -> Tensor:  # [V, B, S, *b, o], [B, S, *b, i] -> [V, B, *b, o, i]
    """Sum of `g aᵀ` over positions."""
    if isinstance(a, SparseRows):
        return a.outer(g)
    dtype = torch.promote_types(a.dtype, g.dtype)
    a = a.to(dtype)
    g = g.to(dtype)
    # Without a sum, a multiplication is faster than batched matrix products.
    if a.shape[1] == 1:
        return g[:, :, 0, ..., None] * a[:, 0, ..., None, :]
    if a.ndim == 3:
        return torch.einsum("vbso,bsi->vboi", g, a)
    return torch.einsum("vbsko,bski->vbkoi", g, a)
