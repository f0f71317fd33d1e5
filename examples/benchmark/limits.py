"""What is necessary for a task, measured in plain PyTorch in the same run as the task: its *limit*.

    KFAC, Monte Carlo   forward, backward to the layers' outputs, Gram products of inputs and
    gradients KFAC, exact         the same with C - 1 backward passes and Gram products of
    gradients: the Hessian of C logits has
                        rank C - 1
    EKFAC, Monte Carlo  KFAC, an eigendecomposition of each factor, and the squares of gradients in
    the eigenbasis construction        KFAC, and a second forward pass to compare with GGN product
    forward with tangents and backward to the parameters; later products do without the forward pass
    Hessian product     a gradient pass with tangents; later products do without the gradient pass
    itself

Gram matrices are symmetric, so half of the multiplications of a matrix product count, at the speed
of a large matrix product. The patches of a convolution of stride 1 overlap: `k` taps in one
direction have `2k - 1` different distances, and only those correlations count. A tangent of a layer
is two products where the layer is one: as functions between layers are counted twice, too, products
of networks with little in their layers can take less than this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from measure import Task
from torch import Tensor, nn
from workloads import Workload


@dataclass
class LayerRows:
    """The rows of one layer in one pass over the data: `positions` for each of the `examples`.

    Attributes:
        inputs: Columns of the input's rows.
        outputs: Columns of the gradients' rows.
        input_products: Multiplications and additions in the Gram matrix of the inputs, for each
            row.
    """

    examples: int
    positions: int
    inputs: int
    outputs: int
    input_products: int


class Limits:
    """The necessary parts of every task on one workload.

    `contestants` are timed in one interleaved run with the tasks; `of` makes limits of the times.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.rows = [_rows_of(layer, work) for layer in work.layers]
        self.batch = len(work.data[0][1])
        self.classes = work.model(work.data[0][0]).shape[1]
        self.gemm_size = 4096 if work.device.type == "cuda" else 768
        self.gram_flops_in = sum(r.examples * r.positions * r.input_products for r in self.rows)
        self.gram_flops_out = sum(r.examples * r.positions * r.outputs**2 for r in self.rows)
        self.sizes = [size for r in self.rows for size in (r.inputs, r.outputs)]

    def contestants(self) -> dict[str, Task]:
        """What has to be timed."""
        m = self.gemm_size
        square = torch.randn(m, m, device=self.work.device)
        matrices = {size: decaying(size, self.work.device) for size in set(self.sizes)}
        buffer = torch.randn(2 * max(map(self._numbers, self.rows)), device=self.work.device)
        return {
            "limit: forward": self._forward,
            "limit: to the outputs": self._to_outputs,
            "limit: matrix product": lambda: square @ square,
            "limit: eigh": lambda: [torch.linalg.eigh(matrices[size]) for size in self.sizes],
            "limit: squares": lambda: [self._squares(r, buffer, matrices) for r in self.rows],
        }

    def parts(self, times: dict[str, float]) -> dict[str, float]:
        """Seconds of each part."""
        rate = 2 * self.gemm_size**3 / times["limit: matrix product"]
        forward = times["limit: forward"]
        return {
            "forward": forward,
            "backward to outputs": max(times["limit: to the outputs"] - forward, 0.0),
            "Grams of inputs": self.gram_flops_in / rate,
            "Grams of gradients": self.gram_flops_out / rate,
            "eigh": times["limit: eigh"],
            "squares": times["limit: squares"],
        }

    def of(self, times: dict[str, float]) -> dict[str, float]:
        """Seconds that each task takes at least."""
        p, gradient_pass = self.parts(times), times["gradient_pass"]
        forward, back, A, G = (
            p["forward"],
            p["backward to outputs"],
            p["Grams of inputs"],
            p["Grams of gradients"],
        )
        kfac = forward + back + A + G
        return {
            "KFAC, Monte Carlo": kfac,
            "KFAC, exact": forward + A + (self.classes - 1) * (back + G),
            "EKFAC, Monte Carlo": kfac + p["eigh"] + p["squares"],
            "construction, defaults": kfac + forward,
            "GGN product, first": gradient_pass + 2 * forward,
            "GGN product, third and later": gradient_pass + forward,
            "Hessian product, first": 3 * gradient_pass,
            "Hessian product, third and later": 2 * gradient_pass,
        }

    def _forward(self) -> None:
        for X, _ in self.work.data:
            self.work.model(X)

    def _to_outputs(self) -> None:
        outputs: list[Tensor] = []
        hooks = [
            m.register_forward_hook(lambda m, args, out: outputs.append(out))
            for m in self.work.layers
        ]
        try:
            for X, y in self.work.data:
                outputs.clear()
                loss = self.work.loss(self.work.model(X), y)
                torch.autograd.grad(loss, outputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _numbers(self, r: LayerRows) -> int:
        return self.batch * max(r.positions * max(r.inputs, r.outputs), r.inputs * r.outputs)

    def _squares(self, r: LayerRows, buffer: Tensor, bases: dict[int, Tensor]) -> None:
        """`Σ_n (Q_Gᵀ J_n Q_A)²` with `J_n = Σ_s g_ns a_nsᵀ`; the numbers in the rows don't
        matter.
        """
        N, S = self.batch, r.positions
        for _ in range(math.ceil(r.examples / N)):
            a, g = (buffer[: N * S * d].view(N * S, d) @ bases[d] for d in (r.inputs, r.outputs))
            if S == 1:
                g.square().T @ a.square()
            else:
                torch.bmm(g.view(N, S, -1).mT, a.view(N, S, -1)).square_().sum(0)


def decaying(size: int, device: torch.device) -> Tensor:
    """A symmetric matrix with a decaying spectrum, as Kronecker factors have."""
    rows = torch.randn(size, size, device=device) / torch.arange(1, size + 1, device=device)
    return rows.T @ rows


def _rows_of(layer: nn.Module, work: Workload) -> LayerRows:
    X, _ = work.data[0]
    shapes: list[tuple[torch.Size, torch.Size]] = []
    hook = layer.register_forward_hook(
        lambda m, args, out: shapes.append((args[0].shape, out.shape))
    )
    try:
        with torch.no_grad():
            work.model(X[:1])
    finally:
        hook.remove()
    (_, out) = shapes[0]
    examples = sum(len(y) for _, y in work.data)
    if isinstance(layer, nn.Conv2d):
        c, taps = layer.in_channels, math.prod(layer.kernel_size)
        distances = math.prod(2 * k - 1 for k in layer.kernel_size)
        flops = c**2 * distances if layer.stride == (1, 1) else (c * taps) ** 2
        return LayerRows(examples, math.prod(out[2:]), c * taps, layer.out_channels, flops)
    assert isinstance(layer, nn.Linear)
    return LayerRows(
        examples, math.prod(out[1:-1]), layer.in_features, layer.out_features, layer.in_features**2
    )
