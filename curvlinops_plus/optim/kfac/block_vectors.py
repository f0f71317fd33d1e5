"""Parameters as the blocks of a curvature see them: one vector for each group of options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import filterfalse
from typing import Any

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_add_, _foreach_copy_  # pyright: ignore[reportPrivateImportUsage]

from curvlinops_plus.linalg import Layout
from curvlinops_plus.optim.kfac.tensor_lists import times

Place = tuple[int, torch.Size, tuple[int, ...], int]  # number of the vector, shape, strides, offset
State = MutableMapping[Any, dict[str, Any]]  # an optimizer's, of its parameters


def copied(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what is kept of a parameter, tensors and numbers."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


class BlockVectors:
    """Parameters that move together, as vectors: one for each option group, with its blocks one behind the other.

    A block's part is the row-major vector of its matrix (`Layout`), which is what its curvature multiplies. So sums and
    norms take one call for a whole group, and blocks are multiplied without copies.

    Args:
        groups: Key to option group; a block is in that of its first parameter.
        dtype: Of the vectors.

    Attributes:
        keys: Of the parameters, in the order of their entries.
        params: Themselves.
        at: The number of the vector that each is in.
        groups_of: The identity of the option group of each.
        distinct_groups: These groups by their identity.
        first_keys: Key of a parameter in each vector.
        groups: The option group of each vector.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        params: Mapping[str, Tensor],
        groups: Mapping[str, MutableMapping[str, Any]],
        dtype: torch.dtype,
    ) -> None:
        in_groups: dict[int, dict[str, Layout]] = {}
        for name, layout in layouts.items():
            in_groups.setdefault(id(groups[layout.names[0]]), {})[name] = layout
        found = list(in_groups.values())
        self._blocks = [list(blocks) for blocks in found]
        self._sizes = [[layout.dim for layout in blocks.values()] for blocks in found]
        self.first_keys = [next(iter(blocks.values())).names[0] for blocks in found]
        self.groups = list(map(groups.__getitem__, self.first_keys))
        self._dtype, self._device = dtype, next(iter(params.values())).device
        places = _places(found)
        self.keys, self._places = list(places), list(places.values())
        self.params = list(map(params.__getitem__, self.keys))
        of_params = list(map(groups.__getitem__, self.keys))
        self.at = [k for k, *_ in self._places]
        self.groups_of = list(map(id, of_params))
        self.distinct_groups = dict(zip(self.groups_of, of_params, strict=True))
        #: Parameters with an axis that the matrix takes apart.
        self._apart = [i for i, p in enumerate(self.params) if p.shape != self._places[i][1]]
        #: Of these, those whose entries can't be views of a vector.
        self._copied = list(filterfalse(self._is_view, self._apart))
        self._known: dict[str, tuple[list[Tensor], list[Tensor], list[int]]] = {}  # vectors, entries, their versions

    def zeros(self) -> list[Tensor]:
        """Zero vectors."""
        return [torch.zeros(sum(sizes), dtype=self._dtype, device=self._device) for sizes in self._sizes]

    def join(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The vectors of tensors that are shaped as the parameters, in their order."""
        vectors = [torch.empty(sum(sizes), dtype=self._dtype, device=self._device) for sizes in self._sizes]
        _foreach_copy_(self._views(vectors), self._taken_apart(tensors))
        return vectors

    def split(self, vectors: Sequence[Tensor]) -> list[Tensor]:  # each [*lead, n]
        """Tensors `[*lead, *shape]` in the order of the parameters, as views where strides allow."""
        tensors, lead = self._views(vectors), vectors[0].shape[:-1]
        for i in self._apart:
            tensors[i] = tensors[i].reshape(*lead, *self.params[i].shape)
        return tensors

    def parts(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Name of a block to its part, as a view."""
        return {
            name: part
            for names, sizes, v in zip(self._blocks, self._sizes, vectors, strict=True)
            for name, part in zip(names, v.split(sizes), strict=True)
        }

    def join_parts(self, parts: Mapping[str, Tensor]) -> list[Tensor]:
        """The vectors of parts: undoes `parts`."""
        return [torch.cat([parts[name] for name in names]) for names in self._blocks]

    def add_to_params(self, vectors: Sequence[Tensor]) -> None:
        """Add vectors to the parameters, in the precision of these."""
        _foreach_add_(self._taken_apart(self.params), self._views(vectors))

    def _views(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        if vectors[0].ndim == 1:
            return [vectors[k].as_strided(shape, strides, at) for k, shape, strides, at in self._places]
        lead, first = vectors[0].shape[:-1], [v.stride()[:-1] for v in vectors]
        return [vectors[k].as_strided(lead + shape, first[k] + strides, at) for k, shape, strides, at in self._places]

    def _is_view(self, i: int) -> bool:
        _, shape, strides, _ = self._places[i]
        try:
            torch.empty_strided(shape, strides, device="meta").view(self.params[i].shape)
        except RuntimeError:
            return False
        return True

    def _taken_apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that are shaped as the parameters, with axes that the matrix takes apart taken apart."""
        tensors = list(tensors)
        for i in self._apart:
            tensors[i] = tensors[i].view(self._places[i][1])
        return tensors

    def times(self, vectors: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
        """Vectors of which the entries of each parameter are multiplied with its factor."""
        of_vectors: list[set[float]] = [set() for _ in vectors]
        for factor, k in zip(factors, self.at, strict=True):
            of_vectors[k].add(factor)
        if all(len(found) == 1 for found in of_vectors):
            return times(vectors, [found.pop() for found in of_vectors])
        return self.join(times(self.split(vectors), factors))

    # --------------------------------------------------------------------------------------- what an optimizer keeps
    def remember_numbers(self, state: State, name: str, numbers: Sequence[float | None]) -> None:
        """Keep a number of each vector as an entry of its parameters' state; None removes it."""
        for p, k in zip(self.params, self.at, strict=True):
            if (number := numbers[k]) is not None:
                state[p][name] = number
            elif (kept := state.get(p)) is not None:
                kept.pop(name, None)

    def recall_numbers(self, state: State, name: str) -> list[float | None]:
        """The number that is kept of each parameter, None where there is no entry."""
        return [None if (kept := state.get(p)) is None else kept.get(name) for p in self.params]

    def remember(self, state: State, name: str, vectors: Sequence[Tensor | None]) -> None:
        """Keep vectors as an entry of each parameter's state; None removes it.

        They may be written to until they are recalled: entries are views where strides allow.
        """
        known, entries, _ = self._known.pop(name, ([], [], []))
        if known and all(v is k for v, k in zip(vectors, known, strict=True)):
            for i in self._copied:
                state[self.params[i]][name] = entries[i] = self.split(known)[i]
        else:
            entries = self._put(state, name, vectors)
        if all(v is not None for v in vectors):
            self._known[name] = [v for v in vectors if v is not None], entries, [t._version for t in entries]

    def _put(self, state: State, name: str, vectors: Sequence[Tensor | None]) -> list[Tensor]:
        """Put entries of vectors into the state; where a vector is None, those that are returned are without memory."""
        empty = (torch.empty(sum(sizes), device="meta") for sizes in self._sizes)
        entries = self.split([nothing if v is None else v for v, nothing in zip(vectors, empty, strict=True)])
        for p, t, k in zip(self.params, entries, self.at, strict=True):
            if vectors[k] is not None:
                state[p][name] = t
            elif p in state:
                state[p].pop(name, None)
        return entries

    def recall(self, state: State, name: str) -> tuple[list[Tensor], list[bool]]:
        """The vectors that are kept, zero where there is no entry; and which parameters have one."""
        found = [None if (kept := state.get(p)) is None else kept.get(name) for p in self.params]
        there = [t is not None for t in found]
        known, entries, versions = self._known.get(name, ([], [], []))
        if entries and all(t is e and e._version == at for t, e, at in zip(found, entries, versions, strict=True)):
            return known, there
        self._known.pop(name, None)
        if not any(there):
            return self.zeros(), there
        filled = [torch.zeros_like(p) if t is None else t for p, t in zip(self.params, found, strict=True)]
        return self.join(filled), there


def _places(blocks: Iterable[Mapping[str, Layout]]) -> dict[str, Place]:
    """Key of a parameter to where its entries are in the vectors of some blocks."""
    places: dict[str, Place] = {}
    for k, layouts in enumerate(blocks):
        sizes = [layout.dim for layout in layouts.values()]
        for layout, part in zip(layouts.values(), torch.empty(sum(sizes), device="meta").split(sizes), strict=True):
            for key, t in layout.views(part).items():
                places[key] = k, t.shape, t.stride(), int(t.storage_offset())
    return places
