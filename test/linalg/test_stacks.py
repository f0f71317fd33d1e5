"""Factors of a size are decomposed with one call, and decisions on a device are read together."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvlinops_plus.errors import CurvatureWarning, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    HeuristicDamping,
    Kronecker,
    Layout,
    RelativeDamping,
    Space,
    Structure,
)
from curvlinops_plus.linalg import stacks as module
from curvlinops_plus.linalg.stacks import lay_together
from test.helpers import F64, normal
from test.laws.test_devices import DEVICE, OtherDevice, other
from test.linalg.cases import psd

__all__ = ["other"]

F32 = torch.float32

FORMS: dict[str, Callable[[BlockDiagonal], Tensor]] = {
    "inverse": lambda K: K.inverse(0.1).to_dense(),
    "inverse, a damping per block": lambda K: K.inverse(
        torch.linspace(0.1, 1, len(K.blocks), dtype=K.dtype, device=K.device)
    ).to_dense(),
    "inverse, relative": lambda K: K.inverse(RelativeDamping(0.1)).to_dense(),
    "inverse of factors": lambda K: K.inverse(HeuristicDamping(0.1)).to_dense(),
    "inverse of a shift": lambda K: K.shift(0.1).inverse().to_dense(),
    "power": lambda K: K.power(-0.5, 0.1).to_dense(),
    "power of factors": lambda K: K.power(-0.5, 0.1, exact=False).to_dense(),
    "eigenvalues": lambda K: K.eigenvalues(),
    "logdet": lambda K: K.logdet,
}


def mixed(dtype: torch.dtype = F64, device: torch.device | str = "cpu") -> BlockDiagonal:
    """Three products of one shape, one of them with a shared factor and a batch of one; another
    shape and another threshold; diagonals, a dense block; a factor of low rank.
    """
    seeds = iter(range(100))

    def factor(*shape: int) -> Tensor:
        return psd(*shape, seed=next(seeds)).to(device, dtype)

    shared = Dense(factor(3, 3), Structure.PSD)
    low = normal(5, 2, seed=50).to(device, dtype)
    blocks: dict[str, Any] = {
        "a": Kronecker(shared, factor(5, 5)),
        "b": Kronecker(factor(3, 3), low @ low.T),
        "c": Kronecker(shared, factor(5, 5)),
        "one": Kronecker(factor(1, 3, 3), factor(1, 5, 5)),
        "other": Kronecker(factor(2, 2), Dense(factor(5, 5), Structure.PSD, 1e-3)),
        "scale": Diagonal(factor(4, 4).diagonal().clone()),
        "half": Kronecker(factor(3, 3), Diagonal(factor(2, 2).diagonal().clone())),
        "dense": Dense(factor(3, 3), Structure.PSD),
    }
    shapes = {name: (block.shape[0],) for name, block in blocks.items()}
    layouts = {name: Layout({name: "d -> 1 d"}, {name: shapes[name]}) for name in blocks}
    return BlockDiagonal(blocks, layouts, Space(shapes))


def products(num: int, *, o: int = 3, i: int = 5, dtype: torch.dtype = F64) -> BlockDiagonal:
    """Blocks of one shape."""
    shapes = {f"layer{k}": (o, i) for k in range(num)}
    layouts = {n: Layout({n: "o i -> o i"}, {n: shape}) for n, shape in shapes.items()}
    blocks = {
        name: Kronecker(psd(o, o, seed=2 * k).to(dtype), psd(i, i, seed=2 * k + 1).to(dtype))
        for k, name in enumerate(shapes)
    }
    return BlockDiagonal(blocks, layouts, Space(shapes))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The shapes of what is decomposed."""
    shapes: list[list[int]] = []
    plain = torch.linalg.eigh

    def counted(M: Tensor) -> Any:
        shapes.append(list(M.shape))
        return plain(M)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    return shapes


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("name", FORMS)
def test_equal_to_one_by_one(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a mixture of shapes, thresholds, batches and ranks."""
    stacked = FORMS[name](mixed(dtype))
    monkeypatch.setattr(module, "_LARGEST_ON_CPU", 0)
    alone = FORMS[name](mixed(dtype))
    rtol = 1e-12 if dtype == F64 else 1e-5
    torch.testing.assert_close(stacked, alone, rtol=rtol, atol=rtol * float(alone.abs().max()))


def test_one_call_for_each_size(calls: list[list[int]]) -> None:
    K = products(4)
    K.inverse(0.1)
    assert sorted(calls) == [[4, 3, 3], [4, 5, 5]]
    # They are remembered, by each factor.
    K.power(-0.5, 1.0)
    K.eigenvalues()
    block = K.blocks["layer2"]
    assert isinstance(block, Kronecker)
    values, Q = block.A.eigh()
    torch.testing.assert_close((Q.matrices() * values) @ Q.matrices().mT, block.A.matrices())
    assert len(calls) == 2
    # One that has changed is decomposed again, by itself.
    assert isinstance(block.A, Dense)
    block.A.matrix.mul_(2)
    K.inverse(0.1)
    assert calls[2:] == [[5, 5]]


def test_pickles_hold_no_stacks() -> None:
    """A factor that remembers its part of a stack is pickled without the others."""
    sizes = []
    for num in (2, 20):
        K = products(num)
        K.inverse(0.1)
        sizes.append(len(pickle.dumps(K.blocks["layer0"])))
    assert sizes[0] == sizes[1]


def test_what_is_not_stacked(calls: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices on the CPU, factors with dampings of their own, other thresholds; stacks have
    a limit.
    """
    products(3).inverse(HeuristicDamping(0.1))
    assert calls == []
    K = mixed()
    K.inverse(0.1)
    # The shared factor counts once; "b" and "half" have the others of its size.
    assert sorted(calls) == [[1, 3, 3], [1, 5, 5], [2, 2], [3, 3, 3], [3, 5, 5], [5, 5]]
    calls.clear()
    monkeypatch.setattr(module, "_LARGEST_STACK", 2 * 9 * 8)
    products(4, i=3).eigenvalues()
    assert calls == [[2, 3, 3]] * 4
    calls.clear()
    monkeypatch.setattr(module, "_LARGEST_ON_CPU", 4)
    products(2).eigenvalues()
    assert sorted(calls) == [[2, 3, 3], [5, 5], [5, 5]]


def test_errors_name_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one matrix of a stack does, the others are not blamed."""
    K = products(3)
    broken = K.blocks["layer1"]
    assert isinstance(broken, Kronecker)
    broken.A.matrices()[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r'^block "layer1": .*\[5, 5\] has 1 entries'):
        K.inverse(0.1)
    broken.A.matrices().zero_()
    with pytest.raises(SingularMatrixError, match=r'^block "layer1"'):
        K.inverse()
    plain = torch.linalg.eigh
    K = products(3, dtype=F32)
    expected = products(3).inverse(0.1).to_dense()

    def fails(M: Tensor) -> Any:
        if M.ndim == 3 or (M.dtype == F32 and len(M) == 5):
            raise RuntimeError("linalg.eigh: failed to converge")
        return plain(M)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    torch.testing.assert_close(K.inverse(0.1).to_dense().double(), expected, rtol=1e-4, atol=1e-5)


def test_modes(calls: list[list[int]]) -> None:
    """With derivatives each by itself; nothing that was remembered in inference mode is of it."""
    K = products(3)
    for block in K.blocks.values():
        assert isinstance(block, Kronecker)
        block.A.matrices().requires_grad_()
    K.logdet.backward()
    assert sorted(calls) == [[3, 3, 3], [5, 5], [5, 5], [5, 5]]
    K = products(3)
    with torch.inference_mode():
        K.inverse(0.1)
    for block in K.blocks.values():
        assert isinstance(block, Kronecker)
        assert not block.A.eigh()[0].is_inference()
    assert len(calls) == 6


def test_as_one() -> None:
    """Without a copy, and only where the matrices lie at equal distances."""
    batch = normal(6, 2, 3)
    for members in ([0, 1, 2], [1, 3, 5], [4], [2, 2]):
        found = module.as_one([batch[k] for k in members])
        assert found is not None
        assert torch.equal(found, batch[members])
        assert found.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
    apart = [batch[0], batch[1].clone()]
    for matrices in ([batch[k] for k in (0, 1, 3)], [batch[1], batch[0]], apart):
        assert module.as_one(matrices) is None
    squares = normal(2, 3, 3)
    assert module.as_one([squares[0], squares[1].mT]) is None


# On a device
# --------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts what the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in ("_local_scalar_dense", "is_nonzero", "_linalg_eigh"):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_on_a_device(name: str, together: bool, other: OtherDevice) -> None:
    """Equal, and the host reads no more of many blocks than of few."""
    expected = FORMS[name](mixed())
    with other:
        K = mixed(device="cpu").to(DEVICE)
        if together:
            lay_together(K.blocks.values())
        with Reads() as reads:
            found = FORMS[name](K)
        torch.testing.assert_close(other.numbers(found), expected, rtol=1e-11, atol=1e-12)
    assert reads.names["_linalg_eigh"] <= 6
    assert reads.names["_local_scalar_dense"] <= 3


def sizes_of(K: BlockDiagonal) -> list[int]:
    return [len(names) for names in K.stacks()]


def test_products_on_a_device(other: OtherDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a shape at once, with equal results: of matrices that were laid together, and
    of inverses and powers.
    """
    K = products(4)
    v = normal(K.shape[0])
    V = normal(K.shape[0], 3)
    split = HeuristicDamping(0.1)
    expected = [K @ v, K.inverse(0.1) @ v, K.inverse(split) @ V, K.power(-0.5, 1.0).T @ v]
    mix = mixed()
    w = normal(mix.shape[0])
    expected += [K_ @ w for K_ in (mix, mix.inverse(0.1), mix.inverse(split))]
    with other:
        K = products(4).to(DEVICE)
        assert sizes_of(K) == []
        lay_together(K.blocks.values())
        made = (K, K.inverse(0.1), K.inverse(split), K.power(-0.5, 1.0).T)
        assert [sizes_of(K_) for K_ in made] == [[4]] * 4
        num_products = [0]
        plain = Kronecker._matmat

        def counted(*args: Any) -> Tensor:
            num_products[0] += 1
            return plain(*args)

        monkeypatch.setattr(Kronecker, "_matmat", counted)
        found = [K_ @ x.to(DEVICE) for K_, x in zip(made, (v, v, V, v), strict=True)]
        assert num_products == [1 + 2 + 1 + 2]  # to eigenvectors and back
        P = made[1]
        mix = mixed().to(DEVICE)
        lay_together(mix.blocks.values())
        made = (mix, mix.inverse(0.1), mix.inverse(split))
        found += [K_ @ w.to(DEVICE) for K_ in made]
        found = [other.numbers(t) for t in found]
        generator = torch.Generator().manual_seed(0)
        draws = other.numbers(P.sample(generator))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
    generator.manual_seed(0)
    torch.testing.assert_close(
        draws, products(4).inverse(0.1).sample(generator), rtol=1e-11, atol=1e-12
    )


def test_laid_together() -> None:
    """Shared factors lie in one place, entries stay, batches and what has a gradient are left."""
    K = mixed()
    expected = K.to_dense()
    places = {name: getattr(block, "factors", (block,)) for name, block in K.blocks.items()}
    before = {name: [t.tensor.data_ptr() for t in parts] for name, parts in places.items()}
    lay_together(K.blocks.values())
    after = {name: [t.tensor.data_ptr() for t in parts] for name, parts in places.items()}
    assert {name for name in before if before[name] != after[name]} == {"a", "b", "c"}
    assert torch.equal(K.to_dense(), expected)
    assert places["a"][0] is places["c"][0]
    memories = [places[name][1].tensor.untyped_storage().data_ptr() for name in "abc"]
    assert len({*memories}) == 1
    # A factor of a product that is a block, too, lies with those of the products.
    factors = [Dense(psd(3, 3, seed=k), Structure.PSD) for k in range(4)]
    pairs = [Kronecker(G, A) for G, A in zip(factors[:2], factors[2:], strict=True)]
    lay_together([factors[0], Dense(psd(3, 3, seed=9), Structure.PSD), *pairs])
    assert module.joined(pairs) is not None
    K = products(2)
    for block in K.blocks.values():
        assert isinstance(block, Kronecker)
        block.A.matrices().requires_grad_()
        kept = block.A.matrices()
        lay_together(K.blocks.values())
        assert block.A.matrices() is kept


def test_power_of_each_by_itself(other: OtherDevice) -> None:
    """One of a shape has a factor of zeros, whose damping can't be split; others are split."""

    def with_zeros() -> BlockDiagonal:
        K = products(3)
        block = K.blocks["layer1"]
        assert isinstance(block, Kronecker)
        block.A.matrices().zero_()
        return K

    expected = with_zeros().power(0.5, 0.1, exact=False).to_dense()
    with other:
        K = with_zeros().to(DEVICE)
        lay_together(K.blocks.values())
        found = other.numbers(K.power(0.5, 0.1, exact=False).to_dense())
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_surprises_on_a_device(other: OtherDevice) -> None:
    """Errors, retries and structures are as on the CPU, and nothing that was computed with false
    expectations is remembered.
    """
    with other:
        K = products(3).to(DEVICE)
        broken = K.blocks["layer1"]
        assert isinstance(broken, Kronecker)
        good = broken.A.matrices().clone()
        for number, error in ((torch.nan, NumericsError), (torch.inf, NumericsError)):
            broken.A.matrices()[0, 0] = number
            with pytest.raises(error, match=r'^block "layer1": .* has 1 entries'):
                K.inverse(0.1)
        broken.A.matrices().zero_()
        with pytest.raises(SingularMatrixError, match=r'^block "layer1"'):
            K.inverse()
        for damping in (-1.0, torch.tensor(-1.0), torch.tensor(torch.nan)):
            with pytest.raises(ValueError, match=r"at least 0|finite number"):
                K.inverse(damping)
        with pytest.raises(SingularMatrixError, match=r'^block "layer1"'):
            K.inverse(torch.tensor(0.0, dtype=F64))
        broken.A.matrices().copy_(good)
        found = other.numbers(K.inverse(0.1).to_dense())
        negative = Diagonal(torch.tensor([-1.0, 2.0], dtype=F64).to(DEVICE))
        layouts = {"w": Layout({"w": "d -> 1 d"}, {"w": (2,)})}
        D = BlockDiagonal({"w": negative}, layouts, Space({"w": (2,)}))
        assert D.structure == Structure.SYMMETRIC
        with pytest.raises(ValueError, match="positive semi-definite"):
            D.power(0.5)
        single = products(2, dtype=F32)
        for block in single.blocks.values():
            assert isinstance(block, Kronecker)
            block.A.matrices().fill_(1.0)
        with pytest.warns(CurvatureWarning, match="retrying in float64") as warned:
            single.to(DEVICE).inverse(dict.fromkeys(single.blocks, (1e-09, 0.1)))
    assert len(warned) >= 1
    torch.testing.assert_close(found, products(3).inverse(0.1).to_dense())
