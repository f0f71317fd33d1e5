"""What operators of blocks say, print and refuse in words; and how they are saved and summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import close, problem
from helpers import normal, seeded
from torch import nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    RelativeDamping,
    ScaledIdentity,
    UnsupportedError,
    curvature,
    load,
    save,
)
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator

MODELS: dict[str, Any] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "norms": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)),
}
DATA = [(normal(5, 3), normal(5, 2, seed=1)), (normal(2, 3, seed=2), normal(2, 2, seed=3))]


def risk(model: str | nn.Module = "plain", data: Any = DATA) -> EmpiricalRisk:
    model = MODELS[model]().double() if isinstance(model, str) else model
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype, generator=seeded(p.numel()))
    return EmpiricalRisk(model, nn.MSELoss(), data)


# ------------------------------------------------------------------------------------------------------------ refusals
def test_model_loss_and_data_in_place_of_a_risk() -> None:
    r = risk()
    arguments: list[Any] = [r.model, nn.MSELoss(), DATA]
    for number in (1, 2, 3):
        with pytest.raises(
            TypeError, match=r"curvature takes an EmpiricalRisk, got a Sequential: .*EmpiricalRisk\(mod"
        ):
            curvature(*arguments[:number])
    with pytest.raises(TypeError, match="a risk and an approximation by position, 1 more were given"):
        curvature(r, KFAC, KFAC)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("c", [-1.0, -0.5])
def test_damping_of_a_negative_multiple(approximation: Any, c: float) -> None:
    """It is refused in the words of the caller: no damping of -0.1, which nobody said, appears."""
    K, eye = curvature(risk(), approximation), torch.eye(26, dtype=torch.float64)
    for A, delta in ((c * K, 0.1), (K.shift(-0.2), 0.1), (c * K.shift(0.3), 0.5)):
        with pytest.raises(ValueError, match=rf'block "0": .* plus {delta} times the identity may be indefinite') as e:
            A.inverse(delta)
        assert "-" not in str(e.value).replace("semi-definite", "")
        close(A.materialize().inverse(delta).to_dense() @ (A.to_dense() + delta * eye), eye, 1e-6)
    close((c * K).inverse(c * 0.1).to_dense(), K.inverse(0.1).to_dense() / c)
    close(K.shift(-0.2).inverse(0.3).to_dense(), K.inverse(0.1).to_dense())
    close((c * K).inverse(RelativeDamping(0.1)).to_dense(), K.inverse(RelativeDamping(0.1)).to_dense() / c)


@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
def test_forward_only_names_all_layers_that_need_gradients_before_anything_runs() -> None:
    class Fails(nn.Sequential):
        def forward(self, x: Any) -> Any:
            raise AssertionError("the model runs")

    r = risk(Fails(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU()).double())
    words = (
        r"(?s)layer '1': DiagonalBlock is made of gradients, and ForwardOnly\(\) sends nothing back. "
        r"The same is true of \['3'\].*"
        r"LayerNorm: ScaledIdentity, PReLU: ScaledIdentity.*parameters \['1.weight', '1.bias'\] out"
    )
    with pytest.raises(UnsupportedError, match=words):
        curvature(r, vectors=ForwardOnly())
    with pytest.raises(UnsupportedError, match=words):
        CurvatureEstimator(r, vectors=ForwardOnly())
    with pytest.raises(UnsupportedError, match="layer '0': EKFAC is made of gradients"):
        curvature(r, EKFAC, vectors=ForwardOnly())


def test_forward_only_beside_blocks_that_need_no_gradients() -> None:
    """What the refusal says to do: layers of other types are left as they are."""
    r = risk("norms")
    K = curvature(r, {nn.LayerNorm: ScaledIdentity, nn.PReLU: ScaledIdentity}, vectors=ForwardOnly())
    apart = [p for name, p in r.model.named_parameters() if name[0] in "024"]
    alone = curvature(EmpiricalRisk(r.model, nn.MSELoss(), DATA, apart), vectors=ForwardOnly())
    for name, block in alone.blocks.items():
        close(K.blocks[name].to_dense(), block.to_dense())
    assert torch.equal(K.blocks["1"].to_dense(), torch.eye(8, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------- printing and saving
def test_a_verification_prints_the_worst_of_each_check() -> None:
    found = curvature(risk()).verify()
    summary, table = str(found).splitlines(), found.table().splitlines()
    checks = {check for _, check, _ in found.rows}
    assert len(summary) == len(checks) + 1
    assert len(table) == len(found.rows) == 11
    assert summary[-1].startswith("all 11 checks within 1e-08; .table() shows each")
    for line in summary[:-1]:
        (check,) = [c for c in checks if line.startswith(c)]
        errors = {layer: error for layer, name, error in found.rows if name == check}
        assert line.split("  ")[1:] or line
        assert f"worst of {len(errors)}, {max(errors, key=lambda layer: errors[layer])}" in line or (
            list(errors.values()).count(max(errors.values())) > 1
        )
        assert f"{max(errors.values()):.1e}" in line
    for (layer, check, error), line in zip(found.rows, table, strict=True):
        assert line.split() == [*f"{layer} {check} {error:.1e}".split()]


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, FullBlock])
@pytest.mark.parametrize("c", [1.0, 0.5])
def test_operators_are_saved_as_their_states(approximation: Any, c: float, tmp_path: Path) -> None:
    r = risk()
    K, path = c * curvature(r, approximation), tmp_path / "K.safetensors"
    save(K, path)
    loaded = BlockwiseLinearOperator.from_state_dict(load(path), r.model, None)
    assert torch.equal(loaded.to_dense(), K.to_dense())
    save(K.state_dict(), path)
    assert torch.equal(BlockwiseLinearOperator.from_state_dict(load(path), r.model, None).to_dense(), K.to_dense())


def test_classic_operators_inverses_and_estimators_are_saved(tmp_path: Path) -> None:
    r, path = risk(), tmp_path / "K"
    params = list(r.model.parameters())
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        K = kind(r.model, nn.MSELoss(), params, DATA)
        inverse = KFACInverseLinearOperator(K, damping=0.1, use_exact_damping=True)
        save(K, path)
        loaded = kind.from_state_dict(load(path), r.model, params, None)
        assert torch.equal(loaded.to_dense(), K.to_dense())
        save(inverse, path)
        assert torch.equal(KFACInverseLinearOperator.from_state_dict(load(path), loaded).to_dense(), inverse.to_dense())
    running, again = CurvatureEstimator(r, EKFAC), CurvatureEstimator(r, EKFAC)
    running.update(DATA[0])
    save(running, path)
    again.load_state_dict(load(path))
    assert torch.equal(again.operator.to_dense(), running.operator.to_dense())


def test_what_has_no_state_is_not_saved(tmp_path: Path) -> None:
    K = curvature(risk())
    for thing, name in ((K @ K, "Product"), (torch.ones(2), "Tensor"), (None, "None")):
        with pytest.raises(TypeError, match=f"save takes a state_dict, or what has one .*a {name}"):
            save(thing, tmp_path / "K")
    assert not (tmp_path / "K").exists()


def test_operators_are_summed() -> None:
    r = risk()
    Ks = [curvature(r, kind) for kind in (KFAC, EKFAC, DiagonalBlock)]
    close(sum(Ks).to_dense(), Ks[0].to_dense() + Ks[1].to_dense() + Ks[2].to_dense())  # type: ignore[union-attr]
    assert sum(Ks[:1]) is Ks[0]
    for other in (1, 0.5, None):
        with pytest.raises(TypeError, match="unsupported operand"):
            other + Ks[0]


# ------------------------------------------------------------------------------------------------------------- mapping
def test_the_mapping_has_every_parameter_of_tied_layers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Any) -> Any:
            return self.three(self.two(self.one(x).tanh()))

    model = Tied().double()
    params = [model.two.bias, model.three.weight, model.one.weight, model.one.bias]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), DATA, params), DiagonalBlock)
    assert K.mapping == {"one": {"weight": 2, "bias": 3, "two.bias": 0}, "three": {"weight": 1}}
    for name in ("tied", "tied with two biases", "tied autoencoder", "tied transformer"):
        p = problem(name)
        positions = [at for layer in p.curvature(DiagonalBlock).mapping.values() for at in layer.values()]
        assert sorted(positions) == list(range(len(p.params)))
