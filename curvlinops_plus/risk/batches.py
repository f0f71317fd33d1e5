"""Mini-batches: read in all formats that are accepted, given to the model, and the graph that it
leaves.

Accepted batches: `(X, y)` with `X` a tensor or a mapping of tensors, or one mapping that carries
its `labels` (Hugging Face).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, IterableDataset

from curvlinops_plus.contexts import entered
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.example_lists import has_lists, with_entries
from curvlinops_plus.options import integer
from curvlinops_plus.risk.output_forms import OutputForm


@dataclass(frozen=True)
class Batch:
    """One mini-batch: inputs and targets on the parameters' device.

    Attributes:
        X: What the model is called with.
        unpack: Call the model as `model(**X)` rather than `model(X)`.
        first: How many examples came before in this pass.
        weight: Weights of the examples [N], in double precision; None for ones.
        forms: For each loss the form in which it reads its output; empty if all read them as they
            are.
        in_lists: Whether examples are entries of lists.
        example_of_rows: The example of each row [M], for each kind of rows of which examples don't
            have as many, one after the other.
    """

    X: Any
    y: Any
    num_examples: int
    unpack: bool = False
    first: int = 0
    weight: Tensor | None = None
    forms: Sequence[OutputForm] = ()
    in_lists: bool = False
    example_of_rows: Sequence[Tensor] = ()


# ------------------------------------------------------------------------------------------ reading
def check_data(data: Any) -> None:
    """Refuse what can't be an iterable of batches; nothing is read.

    A `Dataset` of examples would pass where an example looks like a batch: a sequence [T, C] with
    targets [T] like T examples. So no look at its items could tell, and the caller has to say what
    they are.

    Raises:
        TypeError: If it can't be iterated over, or is a map-style `Dataset` that doesn't say itself
            how.
    """
    kind = type(data)
    dataset = (
        isinstance(data, Dataset)
        and not isinstance(data, IterableDataset)
        and not hasattr(kind, "__iter__")
    )
    if (
        dataset
        or isinstance(data, Tensor)
        or not (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"))
    ):
        advice = (
            "A Dataset holds single examples: wrap it, DataLoader(dataset, batch_size=...), or if "
            "its items are batches already, DataLoader(dataset, batch_size=None)."
        )
        raise TypeError(
            f"`data` is a {kind.__name__}; expected an iterable of batches (X, y): a DataLoader, "
            f"or for one batch data=[(X, y)].{' ' + advice if dataset else ''}"
        )


def require_rereadable(data: Any, reason: str, advice: str = "") -> None:
    """Refuse data that can be read only once.

    Args:
        advice: What else could be done, beginning with a comma.
    """
    if isinstance(data, Iterator):
        raise ValueError(
            f"`data` is an iterator, which can be read only once, and {reason}. Pass a list of "
            f"batches or a DataLoader{advice}."
        )


def read_example_of_rows(
    X: Any, function: Callable[[Any], Any] | None, device: torch.device
) -> Sequence[Tensor]:
    """What `example_of_rows(X)` gives, for each kind of rows.

    Raises:
        TypeError: If it is no vector of integers, and no list of such.
    """
    if function is None:
        return ()
    given = function(X)
    kinds = given if isinstance(given, (list, tuple)) else [given]
    for examples in kinds:
        is_vector = isinstance(examples, Tensor) and examples.ndim == 1
        if not is_vector or examples.dtype not in (torch.int64, torch.int32):
            came = type(examples).__name__
            if isinstance(examples, Tensor):
                came = f"{examples.dtype} {list(examples.shape)}"
            raise TypeError(
                f"example_of_rows(X) returned {came}; expected a vector of integers, the number of "
                "the example that each row belongs to, or a list of such vectors for tensors with "
                "other numbers of rows."
            )
    return [on_device(examples.long(), device) for examples in kinds]


def count_examples(
    X: Any,
    y: Any,
    index: int,
    batch_size_fn: Callable[[Any], int] | None,
    unpack: bool,
    example_of_rows: Sequence[Tensor] = (),
) -> int:
    """N of one batch: from `batch_size_fn(X)`, the largest number of an example that has rows, the
    first axis of X, or the first axis that a mapping's tensors share.

    Raises:
        ValueError: If rows belong to other examples.
    """
    largest = -1
    for examples in example_of_rows:
        if len(examples):
            least, most = torch.stack(torch.aminmax(examples)).tolist()
            if least < 0:
                raise ValueError(f"example_of_rows(X) names example {least} of batch {index}.")
            largest = max(largest, most)
    if batch_size_fn is not None:
        N = integer("batch_size_fn(X)", batch_size_fn(X), low=0)
        if largest >= N:
            raise ValueError(
                f"example_of_rows(X) names example {largest} of batch {index}, which has {N}, "
                "numbered from 0, by batch_size_fn(X)."
            )
        return N
    if example_of_rows:
        return largest + 1
    if isinstance(X, Tensor) and X.ndim:
        return X.shape[0]
    carriers: list[Any] = []
    if unpack and isinstance(y, Tensor) and y.ndim:
        carriers = [y]
    elif isinstance(X, Mapping):
        carriers = [t for t in X.values() if isinstance(t, Tensor) and t.ndim]
    if isinstance(X, np.ndarray):
        raise TypeError(
            f"The input of batch {index} is a NumPy array; expected a tensor, torch.from_numpy(X)."
        )
    sizes = {len(t) if t.ndim else -1 for t in carriers}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"Can't tell how many examples batch {index} has: its input is a {type(X).__name__}, "
            "without a first axis that carries them. Pass `batch_size_fn`, a function of X that "
            "returns the number, for instance `batch_size_fn=lambda X: len(X[0])`, or `len` for a "
            "list with an entry for each example; of several graphs in one object "
            "`example_of_rows`."
        )
    return sizes.pop()


def are_in_lists(X: Any, num_examples: int, batch_size_fn: Callable[[Any], int] | None) -> bool:
    """Whether the examples of an input are entries of lists: of one entry they are one."""
    if batch_size_fn is None or num_examples < 2 or not has_lists(X, num_examples):
        return False
    try:
        return batch_size_fn(with_entries(X, num_examples, [0])) == 1
    except Exception:  # of the user's function, on what it may not be made for
        return False


# --------------------------------------------------------------------------------- trees of tensors
def mapped(function: Callable[..., Any], tree: Any, *args: Any) -> Any:
    """A tensor, mapping, list or tuple with each tensor `t` replaced by `function(t, *args)`; other
    objects stay.
    """
    if isinstance(tree, Tensor):
        return function(tree, *args)
    if isinstance(tree, MutableMapping) and not isinstance(tree, dict):  # UserDict, BatchEncoding
        mapping = copy(tree)
        for key, value in tree.items():
            mapping[key] = mapped(function, value, *args)
        return mapping
    return tree_map_only(Tensor, lambda t: function(t, *args), tree)


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """The same on `device`, and not made in inference mode: then it has no derivatives.

    The host does not wait for a copy to CUDA: from memory that is not pinned it is made in a
    staging buffer first.
    """
    t = t.to(device, non_blocking=t.device.type == "cpu" and device.type == "cuda")
    if t.is_inference():
        with torch.inference_mode(False):
            t = t.clone()
    return t


def copy_of(t: Tensor) -> Tensor:
    """A copy, with what the user has put into the tensor, which models may read."""
    if torch.compiler.is_compiling():
        return t.clone()
    # Not `requires_grad_(t.requires_grad)`, which `torch.func` refuses where it is False.
    clone = t.detach().clone().requires_grad_() if t.requires_grad else t.clone()
    vars(clone).update(vars(t))
    return clone


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tensor, mapping, list or tuple."""
    leaves = tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree)
    return [t for t in leaves if isinstance(t, Tensor)]


def take_examples(batch: Batch, examples: Sequence[int]) -> Batch | None:
    """Some examples of a batch, with every tensor that carries them, or every list.

    None if nothing in the input does, or if a tensor may have examples times positions on its first
    axis, or something else, as a bag of tokens or the nodes of a graph, whose examples may be
    declared.
    """
    if batch.example_of_rows:
        return None
    N = batch.num_examples
    if batch.in_lists:
        X = with_entries(batch.X, N, examples)
        return replace(batch, X=X, y=_targets_of(batch, examples), num_examples=len(examples))
    kinds: set[str] = set()

    def pick(t: Tensor) -> Tensor:
        if not t.ndim:
            return t
        if N in t.shape[:2]:
            kinds.add("examples")
            axis = t.shape.index(N)
            if len(examples) == 1:  # a view, which costs a tenth
                return t.narrow(axis, examples[0], 1)
            return t.index_select(axis, on_device(torch.tensor(examples, device="cpu"), t.device))
        if len(t) != 1:
            kinds.add("unclear")
        if len(t) % N:
            return t
        return pick(t.unflatten(0, (N, -1))).flatten(0, 1)

    X = mapped(pick, batch.X)
    if kinds != {"examples"}:
        return None
    return Batch(X, mapped(pick, batch.y), len(examples), batch.unpack, forms=batch.forms)


def _targets_of(batch: Batch, examples: Sequence[int]) -> Any:
    """The targets of some examples of a batch that has them in lists."""
    N = batch.num_examples
    index = torch.tensor(examples, device="cpu")
    y = with_entries(batch.y, N, examples)

    def rows(t: Tensor) -> Tensor:
        return t.index_select(0, on_device(index, t.device)) if t.ndim and len(t) == N else t

    return mapped(rows, y) if y is batch.y else y


# ------------------------------------------------------------------------------ the graph of a pass
REENTRANT = (
    "The model uses activation checkpointing with use_reentrant=True, which hides parameters from "
    "derivatives other than loss.backward(). Pass use_reentrant=False to torch.utils.checkpoint "
    "(Hugging Face: gradient_checkpointing_kwargs={'use_reentrant': False})."
)


def postorder(tensors: Iterable[Tensor]) -> dict[Any, list[Any]]:
    """Every node of the graph that made some tensors with its children towards the inputs, each
    after all of them. Modes that watch a model's calls don't see it.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [type(node).__name__ for node in postorder([(2 * x).sum()])]
        ['AccumulateGrad', 'MulBackward0', 'SumBackward0']
    """
    below: dict[Any, list[Any]] = {}
    finished: dict[Any, list[Any]] = {}
    with entered(torch._C.DisableTorchFunction()):
        roots = [t.grad_fn for t in tensors]
    stack = [root for root in roots if root is not None]  # leaves have none
    while stack:
        node = stack[-1]
        if node in below:  # what is below it is finished
            stack.pop()
            finished.setdefault(node, below[node])
            continue
        children = below[node] = []
        for child, _ in node.next_functions:
            if child is not None:
                children.append(child)
                if child not in below:
                    stack.append(child)
    return finished


def gradients_of(
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    vectors: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad(outputs, inputs, vectors, allow_unused=True)`, without its comparison of
    symbolic shapes.

    To compare shapes, that function loads SymPy, a third of a second in the first call of a
    process, and takes as long in each as a layer of a small network. And it hides modes that watch
    functions from parts of the model that run again in the backward pass.

    Args:
        inputs: Tensors, or edges of the graph.
        vectors: One for each output, of its shape.
        retain_graph: Whether somebody goes back through the graph once more.
        create_graph: Whether what comes out is differentiated.
    """
    return _engine_run_backward(
        tuple(outputs),
        tuple(vectors),
        retain_graph,
        create_graph,
        tuple(inputs),
        True,
        accumulate_grad=False,
    )


def stream_gradients(
    outputs: Sequence[Tensor],
    edges: Sequence[Any],
    vectors: Sequence[Tensor],
    retain_graph: bool,
    arrive: Callable[[int, Tensor | None], None],
) -> None:
    """Gradients at edges of the graph, handed on as they are computed, none of which is kept.

    Autograd is asked for the lowest edges alone, those without another one between them and the
    inputs; on the way it passes all others, where hooks on nodes see the gradients.

    Args:
        arrive: Called with the number of an edge and the gradient there. An edge that the vectors
            do not reach is left out.
    """
    # Whether an edge lies below a node, of the nodes below the outputs.
    nodes = {edge.node for edge in edges}
    above: dict[Any, bool] = {}
    for node, children in postorder(outputs).items():
        above[node] = any(child in nodes or above[child] for child in children)
    lowest = [k for k, edge in enumerate(edges) if above.get(edge.node) is False]
    if not lowest:
        return
    handles = []

    def at_node(k: int, gradients: Sequence[Tensor | None]) -> None:
        arrive(k, gradients[edges[k].output_nr])

    for k, edge in enumerate(edges):
        if above.get(edge.node):
            handles.append(edge.node.register_prehook(partial(at_node, k)))
    try:
        gradients = gradients_of(outputs, [edges[k] for k in lowest], vectors, retain_graph)
    finally:
        for handle in handles:
            handle.remove()
    for k, g in zip(lowest, gradients, strict=True):
        arrive(k, g)


def prepare_graph(outputs: Sequence[Tensor], num_examples: int) -> bool:
    """Let every batch norm in a graph get gradients whose strides PyTorch reads right; refuse
    graphs with gaps.

    Where the batch or all of an axis of the image has length one, strides don't tell whether a
    tensor is contiguous or channels-last. The CPU kernel of the backward pass takes input and
    gradient to be alike then, and mixes channels up if they are not: with a loss on `[1, C, H, W]`,
    for instance. Instance norm calls it with a batch of one.

    Returns:
        Whether there is any batch norm.

    Raises:
        UnsupportedError: If there is reentrant activation checkpointing, which leaves out
            parameters.

    Cost: a walk through the graph.
    """
    has_batch_norm = False
    for node in postorder(outputs):
        name = node.name()
        if "BatchNorm" in name:
            node.register_prehook(partial(_copy_ambiguous, num_examples))
            has_batch_norm = True
        elif name == "CheckpointFunctionBackward":
            raise UnsupportedError(REENTRANT)
    return has_batch_norm


def raise_unreached() -> NoReturn:
    """The error if derivatives of a model don't reach any parameter."""
    raise UnsupportedError(
        "The output of the model does not depend on any of the parameters in a way that can be "
        "differentiated. Does it run under torch.no_grad(), detach its output, or call "
        "torch.autograd.grad without create_graph=True?"
    )


def _copy_ambiguous(N: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    g = grads[0]
    # Of several examples, instance norm makes one of more channels, which is contiguous.
    if g is not None and g.shape[0] == 1 < N and g.is_contiguous():
        return grads
    # Every other number of a tensor of twice the size: contiguous in no way, which the kernel reads
    # by its strides.
    if g is None or g.device.type != "cpu" or 1 not in (g.shape[0], *g.shape[2:]):
        return grads
    return (torch.stack((g, g), -1)[..., 0], *grads[1:])


def refuse_outside_reads(
    reader: str, tensors: Iterable[Tensor], params: Mapping[str, Tensor]
) -> None:
    """Refuse a model or loss that reads trainable parameters past the modules, where other values
    stand for them.

    Args:
        reader: Which of the two.
        tensors: What it returned.
        params: The parameters in their own tensors, by key.

    Cost: a walk through the graph.
    """
    nodes = postorder(tensors)
    # Nodes of leaves have their tensor as `variable`.
    leaves = {id(getattr(node, "variable", None)) for node in nodes}
    names = [key for key, p in params.items() if id(p) in leaves]
    if names:
        raise UnsupportedError(
            f"The {reader} reads the parameters {names[:5]}{' …' if len(names) > 5 else ''} from "
            "elsewhere than the attributes of modules, such as a list that keeps them, a tensor "
            "kept from an earlier call (a cache of eval mode), or a penalty in the loss. "
            "Derivatives are taken where parameters are replaced in the modules, so that part "
            "would be left out. Let forward read the attribute (self.weight), keep several in an "
            "nn.ParameterList, and add the curvature of a penalty to the operator, as in `H + "
            "weight_decay * IdentityLinearOperator(...)`."
        )
