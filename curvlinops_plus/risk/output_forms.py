"""Forms in which losses read what a model has returned: the same numbers in another shape or dtype,
or with axes in another order.

Training loops write `output.squeeze(-1)`, `output.view(-1, C)`, `output.transpose(1, 2)` or
`output.float()` between a model and its loss. A form is read off the graph between both tensors. It
says nothing of the number of examples, so it changes what the model returns for a part of a batch
in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Nodes of functions that leave row-major order as it is, if they leave out no number.
_IN_ORDER = {
    "AliasBackward0",
    "CloneBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "ToCopyBackward0",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    *(f"SqueezeBackward{k}" for k in range(5)),
}


class Change(NamedTuple):
    """One step of a form: axes are permuted, then the shape is `[-1, *sizes]`, then the dtype
    changes.

    Attributes:
        axes: Of the input, in the new order; the first one stays.
    """

    axes: Sequence[int]
    sizes: Sequence[int]
    dtype: torch.dtype


OutputForm = tuple[Change, ...]


def in_form(output: Tensor, form: OutputForm) -> Tensor:
    """An output in a form, with its graph.

    Example:
        >>> output = torch.arange(6.0).view(2, 3, 1)
        >>> in_form(output, (Change((0, 2, 1), (3,), torch.float64),)).shape
        torch.Size([2, 3])
    """
    for axes, sizes, dtype in form:
        output = output.permute(*axes).reshape(-1, *sizes).to(dtype)
    return output


def with_example_axis(f: Tensor, y: Any, fewest: int) -> tuple[Tensor, Any]:
    """Output and target of a batch of one example, with the axis of the examples where the model
    has squeezed it away.

    Args:
        fewest: Axes that an output has with that of the examples.

    Example:
        >>> f, y = with_example_axis(torch.tensor(2.0), torch.tensor(1.0), 1)
        >>> f.shape, y.shape
        (torch.Size([1]), torch.Size([1]))
        >>> with_example_axis(torch.ones(3), torch.ones(1, 3), 1)[0].shape
        torch.Size([1, 3])
    """
    is_squeezed = f.ndim < fewest
    if isinstance(y, Tensor):
        is_bare = not y.ndim
        is_squeezed |= y.shape == (1, *f.shape) or (is_bare and f.shape[:1] != (1,))
        y = y[None] if is_bare else y
    return f[None] if is_squeezed else f, y


def form_of(f: Tensor, output: Tensor, num_examples: int) -> OutputForm | None:
    """The form in which `f` has the numbers of an output; None if it is not made of it like that.

    Args:
        num_examples: N. The first axis of each shape on the way is a multiple of it, as that of the
            output is.

    Example:
        >>> x = torch.ones(4, 3, 1, requires_grad=True)
        >>> output = 2 * x
        >>> form_of(output[..., 0], output, 4)
        (Change(axes=(0, 1, 2), sizes=(3,), dtype=torch.float32),)
        >>> form_of(output, output, 4), form_of(output + 1, output, 4)
        ((), None)
    """
    if f is output:
        return ()
    end = output.grad_fn, output.output_nr
    source, nodes = _source_of(f, end)
    if source[0] is None:
        return None
    if source == end:
        return _changes(source, nodes, f, num_examples)
    # An output that was selected may be made again by the loop, in the same way.
    source_of_output, nodes_of_output = _source_of(output)
    if source != source_of_output:
        return None
    changes = _changes(source, nodes, f, num_examples)
    alike = changes == _changes(source, nodes_of_output, output, num_examples)
    return () if changes and alike else None


#: A node of a graph and which of its outputs.
_Source = tuple[Any, int]


def _source_of(t: Tensor, end: _Source | None = None) -> tuple[_Source, list[Any]]:
    """What a tensor was made of by nodes of forms alone, not beyond an end; and these nodes, the
    first one first.
    """
    nodes: list[Any] = []
    source: _Source = t.grad_fn, t.output_nr
    while source != end and source[0] is not None:
        kind = source[0].name()
        if kind not in _IN_ORDER and kind not in ("PermuteBackward0", "TransposeBackward0"):
            break
        nodes.append(source[0])
        source = source[0].next_functions[0]
    return source, nodes[::-1]


def _changes(source: _Source, nodes: list[Any], f: Tensor, num_examples: int) -> OutputForm | None:
    """What these nodes do to a source, of which they make `f`; None if it is no form."""
    node, number = source
    shape = tuple(node._input_metadata[number].shape)
    if not nodes or math.prod(shape) != f.numel():
        return None
    changes = []
    for node in nodes:
        axes = _axes_after(node, len(shape))
        made = node._input_metadata[0]
        shape = tuple(made.shape)
        starts_with_examples = shape and num_examples and shape[0] % num_examples == 0
        if axes[:1] != (0,) or not (starts_with_examples or num_examples == 1):
            return None
        changes.append(Change(axes, shape[1:], made.dtype))
    return tuple(changes)


def _axes_after(node: Any, ndim: int) -> tuple[int, ...]:
    """The axes of a tensor with `ndim` of them in the order in which a node has them."""

    def axis(saved: int) -> int:  # negative ones are saved as numbers without sign
        return (saved - 2**64 if saved >= 2**63 else saved) % ndim

    axes = [*range(ndim)]
    if node.name() == "PermuteBackward0":
        axes = [axis(saved) for saved in node._saved_dims]
    elif node.name() == "TransposeBackward0":
        one = axis(node._saved_dim0)
        two = axis(node._saved_dim1)
        axes[one], axes[two] = two, one
    return tuple(axes)
