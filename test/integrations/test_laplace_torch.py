"""The backend of laplace-torch beside its own, and against autodiff; run where laplace-torch is
installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import UnsupportedError
from curvlinops_plus.integrations import laplace_torch
from curvlinops_plus.integrations.laplace_torch import CurvlinopsPlusEF, CurvlinopsPlusGGN
from curvlinops_plus.linalg import Kronecker
from test.cases import close
from test.helpers import normal, seeded
from test.nets import tanh_net

try:
    import laplace
    from laplace.curvature import CurvlinopsGGN
except ImportError:
    laplace = None

needed = pytest.mark.skipif(
    laplace is None, reason="laplace-torch is absent: pip install laplace-torch"
)
N, C = 12, 3
CLASSES, NUMBERS = torch.randint(C, (N,), generator=seeded(2)), normal(N, C, seed=2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x))
        return self.head((h + self.attention(h, h, h)[0]).mean(1))


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return tanh_net(2, 4, C).double(), normal(N, 2, seed=1)


def cnn(more: nn.Module | None = None) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 2, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
    )
    last = nn.Conv2d(2, 1, 1) if more is None else more, nn.Flatten(), nn.LazyLinear(C)
    model, X = (
        nn.Sequential(*layers, nn.Conv2d(4, 2, 2, groups=2), *last).double().eval(),
        normal(N, 1, 4, 4, seed=1),
    )
    model(X[:1])
    return model, X


def attention() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Attention().double(), torch.randint(5, (N, 3), generator=seeded(1))


def fitted(
    make: Any, structure: str, backend: Any, likelihood: str = "classification", **options: Any
) -> Any:
    model, X = make()
    data = DataLoader(
        TensorDataset(X, CLASSES if likelihood == "classification" else NUMBERS), batch_size=5
    )
    la = laplace.Laplace(
        model, likelihood, "all", structure, prior_precision=2.0, backend=backend, **options
    )
    la.fit(data)
    return la


def rows(make: Any) -> tuple[Tensor, Tensor]:
    """Jacobians [N, C, P] by plain automatic differentiation of one example at a time, and
    outputs.
    """
    model, X = make()
    params = {name: p.detach() for name, p in model.named_parameters()}
    found = [jacrev(lambda p, x=x: functional_call(model, p, (x[None],))[0])(params) for x in X]
    return torch.stack([torch.cat([J[key].flatten(1) for key in params], 1) for J in found]), model(
        X
    ).detach()


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_perceptron_is_as_with_its_own_backend(structure: str, likelihood: str) -> None:
    ours, theirs = (
        fitted(mlp, structure, b, likelihood) for b in (CurvlinopsPlusGGN, CurvlinopsGGN)
    )
    X = normal(4, 2, seed=3)
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), rtol=1e-6)
    one, other = ours(X), theirs(X)
    for a, b in zip(one, other) if isinstance(one, tuple) else [(one, other)]:
        close(a, b, rtol=1e-6)


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [cnn, attention])
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_every_layer_is_exact(make: Any, structure: str) -> None:
    J, f = rows(make)
    p = f.softmax(1)
    H = torch.einsum("ncp,ncd,ndq->pq", J, torch.diag_embed(p) - p[:, :, None] * p[:, None], J)
    found = fitted(make, structure, CurvlinopsPlusGGN).H
    close(found, H if structure == "full" else H.diagonal())


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [cnn, attention])
def test_kronecker_factors_of_every_layer(make: Any) -> None:
    la = fitted(make, "kron", CurvlinopsPlusGGN)
    exact, found = fitted(make, "diag", CurvlinopsPlusGGN).H, la.H_facs.diag()
    assert found.shape == exact.shape
    assert 0.6 < float(found.sum() / exact.sum()) < 1.5
    assert bool(la(make()[1]).isfinite().all())


@needed
@pytest.mark.filterwarnings("ignore")
def test_parameters_of_another_shape_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'4.weight' has no Kronecker factors of its shape"):
        fitted(lambda: cnn(nn.ConvTranspose2d(2, 1, 2)), "kron", CurvlinopsPlusGGN)


@needed
@pytest.mark.filterwarnings("ignore")
def test_empirical_fisher_subnetworks_and_last_layers() -> None:
    model, X = mlp()
    J, f = rows(mlp)
    g = torch.einsum("nc,ncp->np", f.softmax(1) - nn.functional.one_hot(CLASSES, C), J)
    close(fitted(mlp, "full", CurvlinopsPlusEF).H, g.T @ g)
    data = DataLoader(TensorDataset(X, CLASSES), batch_size=5)
    for structure in ("diag", "full"):
        picked = torch.tensor([1, 5, 20])
        la = laplace.Laplace(
            model,
            "classification",
            "subnetwork",
            structure,
            subnetwork_indices=picked,
            backend=CurvlinopsPlusGGN,
        )
        la.fit(data)
        whole = fitted(mlp, structure, CurvlinopsPlusGGN).H
        close(la.H, whole[picked] if structure == "diag" else whole[picked][:, picked])
    for structure in ("diag", "kron", "full"):
        pair = []
        for backend in (CurvlinopsPlusGGN, CurvlinopsGGN):
            la = laplace.Laplace(
                mlp()[0], "classification", "last_layer", structure, backend=backend
            )
            la.fit(data)
            pair.append(la.log_marginal_likelihood())
        close(*pair, rtol=1e-6)


@needed
@pytest.mark.filterwarnings("ignore")
def test_draws_of_the_model_differ_between_batches() -> None:
    la = fitted(
        mlp, "diag", CurvlinopsPlusGGN, backend_kwargs={"stochastic": True, "num_samples": 400}
    )
    close(la.H, fitted(mlp, "diag", CurvlinopsPlusGGN).H, rtol=0.2)
    assert la.backend._drawn == 3


def test_factors_of_groups_and_of_a_transposed_parameter() -> None:
    def psd(n: int) -> Tensor:
        M = normal(n, n, seed=4)
        return M @ M.mT

    stacked = Kronecker(torch.stack([psd(3), 2 * psd(3)]), psd(2))
    pair = laplace_torch._pair(stacked, torch.arange(12), 6)
    assert pair is not None
    close(torch.kron(*pair), stacked.to_dense())
    own = Kronecker(torch.stack([psd(3), 2 * psd(3)]), torch.stack([psd(2), 3 * psd(2)]))
    pair = laplace_torch._pair(own, torch.arange(12), 6)
    assert pair is not None
    close(pair[0].trace() * pair[1].trace(), own.trace)
    transposed = Kronecker(psd(3), psd(2))  # the parameter is [i, o]
    at = torch.arange(6).view(2, 3).T.flatten()
    pair, order = laplace_torch._pair(transposed, at, 2), at.argsort()
    assert pair is not None
    close(torch.kron(*pair), transposed.to_dense()[order][:, order])
    assert laplace_torch._pair(transposed, at.flip(0), 2) is None
