"""Factors written for bergson: beside its own, and as the matrix they stand for; run with it where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import close
from helpers import F64, normal, seeded
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    RelativeDamping,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.integrations.bergson import save_factors

try:
    from bergson.config import InversionConfig
    from bergson.gradients import GradientProcessor
    from bergson.hessians import eigenvectors
    from bergson.hessians.kfac import CovarianceCollector
    from bergson.hessians.preconditioner import FactoredPreconditioner, load_preconditioner

    bergson: Any = eigenvectors
except ImportError:
    bergson = None

needed = pytest.mark.skipif(bergson is None, reason="bergson is absent: pip install bergson")
stored = pytest.importorskip("safetensors.torch")
N, S, C = 6, 4, 3
INVERSIONS = ["damped_inverse", "absolute_damped_inverse", "factored_tikhonov", "tikhonov_filtered"]


class ClassesFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [N, S, C] -> [N, C, S]
        return x.transpose(1, 2)


def tokens() -> tuple[nn.Module, EmpiricalRisk, Any]:
    """Layers on sequences, and the total loss of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C, bias=False), ClassesFirst()).double()
    X, y = normal(N, S, 4, seed=1), torch.randint(C, (N, S), generator=seeded(2))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), list(zip(X.split(4), y.split(4))))
    return model, risk, torch.ones(N, S).bool()


def gpt2() -> tuple[nn.Module, EmpiricalRisk, Any]:
    """`Conv1D` layers, and the last position of a document has no label."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=S, n_embd=4, n_layer=1, n_head=2, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    X = torch.randint(7, (N, S), generator=seeded(1))
    mask = (torch.arange(S) < S - 1).expand(N, S)
    names = {name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    params = {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] in names}
    risk = EmpiricalRisk(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        [(part, part[:, 1:]) for part in X.split(4)],
        params,
        output=lambda out: out.logits[:, :-1].transpose(1, 2),
        mask=lambda X, y: mask[: len(X)],
    )
    return model, risk, mask


def fit(model: nn.Module, risk: EmpiricalRisk, mask: Tensor, folder: Path, corrected: bool) -> None:
    """bergson's own factors of the empirical Fisher matrix, by its collectors."""
    base = getattr(model, "base_model", model)
    common: Any = {"model": base, "processor": GradientProcessor(include_bias=True), "dtype": F64, "path": str(folder)}
    common["target_modules"] = {name for name, _ in base.named_modules() if "mlp" in name or "attn" in name} or None

    def show(collector: Any) -> None:
        for X, y in risk.data:
            with collector.with_batch(mask[: len(X)]):
                out = model(X if not X.is_floating_point() else X.clone().requires_grad_())  # full backward hooks
                out = out.logits[:, :-1].transpose(1, 2) if hasattr(out, "logits") else out
                nn.functional.cross_entropy(out, y, reduction="sum").backward()
        collector.teardown()
        model.zero_grad()

    collector = CovarianceCollector(**common)
    show(collector)
    total = int(mask.sum())
    pairs = {}
    for side in ("activation", "gradient"):
        pairs[side] = bergson.compute_eigendecomposition(str(folder / f"{side}_sharded"), total)
    bergson.save_uncorrected_eigenvalues(folder, pairs["activation"], pairs["gradient"], total, 0, 1, num_documents=N)
    if corrected:
        show(bergson.LambdaCollector(**common, num_documents=N))


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [tokens, gpt2])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_its_preconditioner_is_that_of_its_own_factors(make: Any, approximation: Any, tmp_path: Path) -> None:
    model, risk, mask = make()
    K = curvature(risk, approximation, vectors=Empirical())
    save_factors(K / K.examples, tmp_path / "ours")
    corrected = approximation is EKFAC
    fit(model, risk, mask, tmp_path / "theirs", corrected)
    for kind in ("eigenvalue_correction_sharded",) if corrected else ("eigenvalue_sharded",):
        ours, theirs = (stored.load_file(tmp_path / who / kind / "shard_0.safetensors") for who in ("ours", "theirs"))
        assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
        for name, values in ours.items():
            assert abs(float(values.sum() / theirs[name].sum()) - 1) < 1e-9
    eigenbasis = FactoredPreconditioner.from_path(tmp_path / "ours", ev_correction=corrected)
    grads = {
        name: normal(3, len(eigenbasis.eigen_g[name]) * len(eigenbasis.eigen_a[name]), seed=k).float()
        for k, name in enumerate(eigenbasis.lambdas)
    }
    for inversion in INVERSIONS[: 2 if corrected else None]:
        options = {"inversion_cfg": InversionConfig(inversion=inversion), "ev_correction": corrected}
        ours, theirs = (load_preconditioner(tmp_path / who, **options).apply(grads) for who in ("ours", "theirs"))
        assert ours.keys() == grads.keys()
        for name, product in ours.items():
            close(product, theirs[name], rtol=1e-5)
    # And the inverse of the operator itself, whose blocks are row-major vectors of the same matrices.
    P = (K / K.examples).inverse(RelativeDamping(0.1))
    options = {"inversion_cfg": InversionConfig(), "ev_correction": corrected}
    products = load_preconditioner(tmp_path / "ours", **options).apply(grads)
    for name, block in P.blocks.items():
        short = name.removeprefix("transformer.")
        close(products[short], (block @ grads[short].double().T).T, rtol=1e-5)


@needed
@pytest.mark.parametrize("shards", [2, 3])
def test_it_joins_shards(shards: int, tmp_path: Path) -> None:
    _, risk, _ = tokens()
    K = curvature(risk, KFAC)
    save_factors(K, tmp_path / "one")
    save_factors(K, tmp_path / "several", shards=shards)
    options: Any = {"inversion_cfg": InversionConfig(inversion="factored_tikhonov")}
    one, several = (FactoredPreconditioner.from_path(tmp_path / which, **options) for which in ("one", "several"))
    for part in ("eigen_a", "eigen_g", "lambdas", "factor_eig_a", "factor_eig_g"):
        for name, tensor in getattr(one, part).items():
            assert torch.equal(getattr(several, part)[name], tensor)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_files_have_the_matrix(approximation: Any, shards: int, tmp_path: Path) -> None:
    _, risk, _ = tokens()
    K = 2.5 * curvature(risk, approximation)
    save_factors(K, tmp_path / "new", shards=shards)

    def joined(kind: str, name: str) -> Tensor:
        files = [tmp_path / "new" / kind / f"shard_{rank}.safetensors" for rank in range(shards)]
        return torch.cat([stored.load_file(file)[name] for file in files])

    kind = "eigenvalue_sharded" if approximation is KFAC else "eigenvalue_correction_sharded"
    for name, block in K.blocks.items():
        QG, QA, values = (joined(part, name) for part in ("eigen_gradient_sharded", "eigen_activation_sharded", kind))
        Q = torch.kron(QG, QA)
        close(Q * values.flatten() @ Q.mT, block.to_dense())
        if approximation is KFAC:
            a = stored.load_file(tmp_path / "new" / "factor_eig_a" / f"shard_{shards - 1}.safetensors")[name]
            close(torch.outer(joined("factor_eig_g", name), a), values)
    sizes = [len(stored.load_file(tmp_path / "new" / kind / f"shard_{r}.safetensors")["0"]) for r in range(shards)]
    assert sizes == {1: [5], 2: [3, 2], 4: [2, 1, 1, 1]}[shards]  # the first process takes what is left over


def test_what_it_has_no_factors_for_is_refused(tmp_path: Path) -> None:
    model, risk, _ = tokens()
    assert isinstance(model, nn.Sequential)
    with pytest.raises(ValueError, match="shards to be at least 1, got 0"):
        save_factors(curvature(risk, KFAC), tmp_path / "new", shards=0)
    with pytest.raises(UnsupportedError, match=r"layer '0' has a block of type Diagonal.*bergson.save_factors"):
        save_factors(curvature(risk, {"0": DiagonalBlock}), tmp_path / "new")
    more = nn.Sequential(*model[:3], nn.Linear(C, C, dtype=F64), ClassesFirst())
    params = {n: p for n, p in more.named_parameters() if n != "3.bias"}
    some = EmpiricalRisk(more, nn.CrossEntropyLoss(), risk.data, params)
    with pytest.raises(UnsupportedError, match=r"layer '3' has a bias that is not in `params`, and other biases are"):
        save_factors(curvature(some, KFAC), tmp_path / "new")
    weights = {n: p for n, p in more.named_parameters() if n.endswith("weight")}
    save_factors(curvature(EmpiricalRisk(more, nn.CrossEntropyLoss(), risk.data, weights), KFAC), tmp_path / "weights")
    images = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, C, 2), nn.Flatten())
    data = [(torch.rand(3, 4), torch.zeros(3).long())]
    with pytest.raises(UnsupportedError, match=r"is of type Conv2d: bergson has factors of Linear, and of Conv1D"):
        save_factors(curvature(EmpiricalRisk(images, nn.CrossEntropyLoss(), data), KFAC), tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Headed(nn.Module):
    """As models of transformers: the body is `base_model`, and the head is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, C)

    @property
    def base_model(self) -> nn.Module:
        return self.body

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_names_are_those_in_the_base_model(tmp_path: Path) -> None:
    model = Headed()
    data = [(torch.rand(3, 4), torch.zeros(3).long())]
    with pytest.raises(UnsupportedError, match=r"layer 'head' is not in `model.base_model`"):
        save_factors(curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), KFAC), tmp_path / "new")
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, list(model.body.parameters()))
    save_factors(curvature(risk, KFAC), tmp_path / "new")
    assert list(stored.load_file(tmp_path / "new" / "eigenvalue_sharded" / "shard_0.safetensors")) == ["0"]
