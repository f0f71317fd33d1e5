"""The Gram matrix of patches without patches, against the plain one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.layer import convolution_gram as grams
from curvlinops_plus.layer import weight_gradient
from curvlinops_plus.layer.conv import ConvRule
from curvlinops_plus.layer.patches import Geometry


def plain(geometry: Geometry, x: Tensor) -> Tensor:
    rows = geometry.rows(x).flatten(0, 1)
    return rows.T @ rows


def geometry(kernel: tuple[int, ...], padding: tuple[tuple[int, int], ...]) -> Geometry:
    ones = (1,) * len(kernel)
    return Geometry(kernel, ones, ones, padding)


@st.composite
def correlated(draw: st.DrawFn) -> tuple[Geometry, tuple[int, ...]]:
    n = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 5 if n < 3 else 3)) for _ in range(n))
    padding = tuple((draw(st.integers(0, k + 1)), draw(st.integers(0, k + 1))) for k in kernel)
    size = tuple(draw(st.integers(max(1, k - sum(p)), 7)) for k, p in zip(kernel, padding, strict=True))
    return geometry(kernel, padding), (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *size)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(correlated())
def test_correlations_are_exact(drawn: tuple[Geometry, tuple[int, ...]]) -> None:
    """Any kernel, odd or even, any padding, also more than the kernel is wide, images smaller than the kernel."""
    where, shape = drawn
    torch.manual_seed(0)
    x = torch.randn(shape)
    A = grams.correlation_gram(where, x)
    torch.testing.assert_close(A, plain(where, x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(A, A.T, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(correlated(), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3))
def test_correlations_of_batches_add_up(
    drawn: tuple[Geometry, tuple[int, ...]], batches: list[tuple[int, int]]
) -> None:
    """One matrix is made of the correlations of several batches, whose images may have other sizes."""
    where, (_, c, *_) = drawn
    torch.manual_seed(0)
    images = [torch.randn(n, c, *(k + 1 + more for k in where.kernel)) for n, more in batches]
    form = grams.Correlations(where, c)
    packed = [torch.cat(grams.correlations(where, x)) for x in images]
    assert {len(values) for values in packed} == {form.size}
    A = form.unpack(torch.stack(packed).sum(0))
    torch.testing.assert_close(A, sum(plain(where, x) for x in images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("padding", "packs"), [(1, True), ("same", True), (0, False)])
def test_matrices_of_fewer_numbers_are_packed(padding: int | str, packs: bool) -> None:
    """Without padding there are more correlations at the borders than entries of the matrix."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("correlations pay only where oneDNN computes them")
    x, where = torch.rand(64, 16, 12, 12).float(), Geometry.of(nn.Conv2d(16, 4, 3, padding=padding))
    packed = grams.packed_gram(where, x, ones=True)
    assert (packed is not None) == packs
    if packed is not None:
        assert len(packed.values) < 144**2 // 2
        assert packed.total is not None
        rows = where.rows(x).flatten(0, 1)
        torch.testing.assert_close(packed.form.unpack(packed.values), rows.T @ rows, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(packed.form.row_sum(packed.total), rows.sum(0), rtol=1e-4, atol=1e-2)
        assert packed.rows == len(rows)


@st.composite
def convolved(draw: st.DrawFn) -> tuple[Geometry, tuple[int, ...]]:
    """Every option of a convolution, and the shape of one of its images."""
    n, mode = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["constant", "constant", "reflect", "replicate", "circular"])),
    )
    numbers = [[draw(st.integers(1, 3)) for _ in range(n)] for _ in range(3)]
    kernel, stride, dilation = map(tuple, numbers)
    size = tuple(draw(st.integers(1 + d * (k - 1), 7)) for k, d in zip(kernel, dilation, strict=True))
    most = [min(2, s - 1) if mode == "reflect" else min(2, s) for s in size]
    padding = tuple((draw(st.integers(0, m)), draw(st.integers(0, m))) for m in most)
    return Geometry(kernel, stride, dilation, padding, mode), (draw(st.integers(1, 3)), *size)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(convolved(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_products_of_whole_images(drawn: tuple[Geometry, tuple[int, ...]], batches: list[int]) -> None:
    """The Gram matrix of patches is made of the sum of those of images, of which only a triangle counts."""
    where, shape = drawn
    torch.manual_seed(0)
    images = [torch.randn(n, *shape) for n in batches]
    total = sum(x.flatten(1).T @ x.flatten(1) for x in images)
    assert isinstance(total, Tensor)
    values = (total.tril() + torch.rand_like(total).triu(1)).view(shape * 2)
    before = values.clone()
    A = grams.Images(where, shape[0]).unpack(values)
    torch.testing.assert_close(A, sum(plain(where, x) for x in images), rtol=1e-10, atol=1e-10)
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("module", "shape", "packs"),
    [
        (nn.Conv2d(16, 4, 3, padding=1), (256, 16, 4, 4), True),
        (nn.Conv2d(1, 4, 3, padding=1), (64, 1, 8, 8), True),
        (nn.Conv2d(1, 4, 3, padding=1, stride=2), (64, 1, 8, 8), True),
        (nn.Conv2d(16, 4, 3, padding=2, dilation=2), (64, 16, 4, 4), True),
        (nn.Conv2d(16, 4, 3, padding=1, padding_mode="circular"), (64, 16, 4, 4), True),
        (nn.Conv2d(64, 4, 3, padding=1), (16, 64, 2, 2), False),  # reading the matrix costs more
        (nn.Conv2d(64, 4, 3, padding=1), (64, 64, 2, 2), True),
        (nn.Conv2d(64, 4, 3, padding=1), (256, 64, 4, 4), False),  # 4 MiB, three times the matrix
        (nn.Conv2d(16, 4, 3, padding=1), (4, 16, 4, 4), False),
        (nn.Conv2d(16, 4, 2), (256, 16, 4, 4), False),
        (nn.Conv2d(16, 4, 4, stride=4), (256, 16, 4, 4), False),
        (nn.Conv2d(1, 4, 1), (256, 1, 2, 2), False),
        (nn.Conv2d(16, 4, 3, padding=1, groups=2), (256, 16, 4, 4), False),
        (nn.Conv1d(3, 4, 5, padding=2), (64, 3, 12), True),
        (nn.Conv1d(1, 4, 255, padding=127), (64, 1, 256), False),  # a table of 34 GB for reading it
        (nn.Conv3d(2, 4, 3, padding=1), (64, 2, 3, 3, 3), True),
    ],
)
def test_small_images_are_multiplied_whole(
    module: nn.Conv2d, shape: tuple[int, ...], packs: bool, dtype: torch.dtype
) -> None:
    """Of any convolution without groups where that takes less work; as exact as the products of patches."""
    torch.manual_seed(0)
    x, where = torch.randn(shape, dtype=torch.float64), Geometry.of(module)
    packed = ConvRule().packed_gram(module, x.to(dtype), True)
    found = packed is not None and isinstance(packed.form, grams.Images)
    assert found == packs
    if packed is not None and found:
        rows, tolerance = where.rows(x).flatten(0, 1), 1e-12 if dtype == torch.float64 else 2e-6
        A, exact = packed.form.unpack(packed.values), rows.T @ rows
        assert A.dtype == dtype
        assert (A - exact).abs().max() < tolerance * exact.abs().max()
        assert packed.total is not None
        torch.testing.assert_close(
            packed.form.row_sum(packed.total).double(), rows.sum(0), rtol=0, atol=tolerance * len(rows)
        )
        assert packed.rows == len(rows)


@pytest.mark.parametrize("shape", [(8, 16, 12, 12), (160, 8, 32, 32), (1, 8, 400, 400), (2, 8, 80000)])
def test_correlations_are_as_exact_as_float32_allows(shape: tuple[int, ...]) -> None:
    """Also of many and of large images, over which PyTorch's weight gradients add up one number after the other."""
    n = len(shape) - 2
    where, x = geometry((3,) * n, ((1, 1),) * n), torch.rand(shape) - 0.25
    exact = grams.patch_gram(where, x)
    error = (grams.correlation_gram(where, x.float()) - exact).norm() / exact.norm()
    assert error < 2e-6


@pytest.mark.parametrize("shape", [(3, 2, 9), (3, 2, 6, 5), (2, 2, 5, 4, 6)])
@pytest.mark.parametrize("added", [1, 13, 70])
def test_correlations_in_pieces(shape: tuple[int, ...], added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some examples at a time, or some lines of one."""
    for module in (grams, weight_gradient):
        monkeypatch.setattr(module, "ADDED", added)
    monkeypatch.setattr(grams, "_PATCH_BYTES", 1)
    n = len(shape) - 2
    where, x = geometry((3, 2, 4)[:n], ((1, 1),) * n), torch.randn(shape)
    torch.testing.assert_close(grams.correlation_gram(where, x), plain(where, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 30, 5, 6), (2, 30, 2, 3, 5)])
def test_correlations_of_small_images_of_many_channels(shape: tuple[int, ...]) -> None:
    """Images are the weights there, and channels the examples."""
    n = len(shape) - 2
    where, x = geometry((3, 2, 3)[:n], ((1, 0),) * n), torch.randn(shape)
    torch.testing.assert_close(grams.correlation_gram(where, x), plain(where, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("many", "kernel"), list(product([1, 40], [(3,), (2, 3), (2, 1, 3)])))
def test_patches_in_pieces(many: int, kernel: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in channels-last order, a few examples at a time, as many times as it takes."""
    monkeypatch.setattr(grams, "_PATCH_BYTES", 1)
    n = len(kernel)
    where = Geometry(kernel, (2,) * n, (1,) * n, ((1, 0),) * n)
    x = torch.randn(many, 2, *[6] * n)
    torch.testing.assert_close(grams.patch_gram(where, x), plain(where, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [(3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2}, {"padding": 2, "padding_mode": "circular"}])
@pytest.mark.parametrize("pieces", [False, True])
def test_patches_of_many_channels(
    kernel: tuple[int, ...], options: dict[str, Any], pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight channels or more, rows are formed in channels-last order."""
    if pieces:
        monkeypatch.setattr(grams, "_PATCH_BYTES", 1)
    module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1](9, 2, kernel, **options)
    x, taken = torch.randn(40, 9, *[7, 5, 6][: len(kernel)]), []
    rows = Geometry.channels_last_rows
    monkeypatch.setattr(Geometry, "channels_last_rows", lambda where, x: taken.append(1) or rows(where, x))
    where = Geometry.of(module)
    torch.testing.assert_close(grams.patch_gram(where, x), plain(where, x), rtol=1e-10, atol=1e-10)
    assert taken


LARGE = (16, 64, 16, 16)


@pytest.mark.parametrize(
    ("module", "shape", "pays"),
    [
        (nn.Conv2d(64, 8, 3, padding=1), LARGE, True),
        (nn.Conv2d(64, 8, 3), LARGE, True),
        (nn.Conv2d(64, 8, 4, padding="same"), LARGE, True),
        (nn.Conv2d(64, 8, 3, padding=1, stride=2), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=2, dilation=2), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=1, padding_mode="circular"), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=1).double(), LARGE, False),
        (nn.Conv2d(64, 8, 3, padding=1), (1, 64, 16, 4), False),
        (nn.Conv2d(2, 8, 3, padding=1), (16, 2, 16, 16), False),
        (nn.Conv2d(64, 8, 3, padding=1), (200, 64, 2, 2), False),
    ],
)
def test_which_way_is_taken(
    module: nn.Conv2d, shape: tuple[int, ...], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("correlations pay only where oneDNN computes them")
    x = torch.randn(shape, dtype=module.weight.dtype if module.weight.dtype == torch.float64 else torch.float32)
    where, taken = Geometry.of(module), []
    for name in ("patch_gram", "correlation_gram"):
        monkeypatch.setattr(grams, name, lambda g, x, name=name: taken.append(name))
    grams.input_gram(where, x)
    assert taken == ["correlation_gram" if pays else "patch_gram"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sizes", [(5, 15, 64), (5, 16, 64), (5, 16, 63), (40, 64, 256), (3, 65, 300), (1, 16, 64)])
def test_products_of_channels(sizes: tuple[int, ...], last: bool, dtype: torch.dtype) -> None:
    """Image by image, or all at once: whichever is faster."""
    torch.manual_seed(0)
    images = torch.randn(sizes, dtype=torch.float64)
    images = images.mT.contiguous().mT if last else images
    exact = torch.einsum("bcs,bds->cd", images, images)
    away = (grams.image_gram(images.to(dtype)) - exact).abs().max() / exact.abs().max()
    assert away < (1e-6 if dtype == torch.float32 else 1e-14)
