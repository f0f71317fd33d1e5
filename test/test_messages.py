"""Every error of ours says what was expected, what came and what to do next; nothing of the user's has changed then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import NETS, Problem, close, fresh, problem, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    TNT,
    Accumulator,
    AffineRule,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    FisherMCLinearOperator,
    ForwardOnly,
    FullBlock,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    Jacobian,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    LayerRule,
    MonteCarlo,
    NumericsError,
    UnsupportedError,
    VerificationError,
    compute_eigenvalue_correction_linear_weight_sharing,
    curvature,
    register_rule,
)

EXACT = [GGNLinearOperator, HessianLinearOperator, EFLinearOperator, FisherMCLinearOperator]
CLASSIC = [KFACLinearOperator, EKFACLinearOperator, *EXACT]
every_operator = pytest.mark.parametrize("kind", CLASSIC, ids=lambda kind: kind.__name__)


@contextmanager
def says(error: type[Exception], words: str, model: nn.Module, data: Any = None) -> Iterator[None]:
    """Expect an error whose message holds these words, and an untouched model."""
    with unchanged(model, data), pytest.raises(error, match=words):
        yield


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 2, 0, 1, 2])
CE = nn.CrossEntropyLoss()


def risk(model: nn.Module, data: Any = None, loss: Any = CE, params: Any = None, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, loss, [(X, Y)] if data is None else data, params, **options)


# --------------------------------------------------------------------------------------------------------- parameters


def test_parameters_that_are_not_the_model_s() -> None:
    p = problem("mlp")
    foreign = torch.zeros(5, 4, dtype=torch.float64)
    for kind in CLASSIC:
        with says(ValueError, r"params\[1\] with shape \[5, 4\] is not a parameter of the model Sequential", p.model):
            kind(p.model, p.loss, [p.params[0], foreign], p.data)
        with says(ValueError, r"params\['w'\] with shape \[5, 4\] is not a parameter", p.model):
            kind(p.model, p.loss, {"w": foreign}, p.data)
        with says(ValueError, r"params\[1\] is a str; expected a parameter", p.model):
            kind(p.model, p.loss, [p.params[0], "0.weight"], p.data)
        with says(ValueError, r"params\[1\] is the same parameter as params\[0\]: the model's '0.weight'", p.model):
            kind(p.model, p.loss, [p.params[0], p.params[0]], p.data)
        with says(ValueError, "`params` is empty", p.model):
            kind(p.model, p.loss, [], p.data)
    frozen = fresh("mlp").model.requires_grad_(False)
    with says(ValueError, "No parameter of the model requires a gradient", frozen):
        risk(frozen)


def test_models_that_are_no_modules() -> None:
    with pytest.raises(ValueError, match=r"`model` is a function; layers can only be recorded in a torch.nn.Module"):
        risk(lambda x: x)  # type: ignore[arg-type]
    p = problem("mlp")
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        with says(
            ValueError, r"a function needs `params` as a dict, and is called as model_func\(params, X\)", p.model
        ):
            kind(lambda x: x, p.loss, p.params, p.data)


def test_parameters_without_a_curvature() -> None:
    model = nn.Linear(4, 3)
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)
    with says(ValueError, "torch.int64.*only real floating-point parameters", model):
        risk(model, params=list(model.parameters()))


# ------------------------------------------------------------------------------------------------------------- losses


@every_operator
def test_losses_without_reduction_and_unknown_losses(kind: Any) -> None:
    p = problem("mlp")
    with says(UnsupportedError, r'CrossEntropyLoss\(reduction=.none.\).*use "mean" or "sum"', p.model):
        kind(p.model, nn.CrossEntropyLoss(reduction="none"), p.params, p.data)
    if kind in (KFACLinearOperator, EKFACLinearOperator, FisherMCLinearOperator):
        with says(
            ValueError, r"no likelihood is registered for the loss HuberLoss(.|\n)*@register_likelihood", p.model
        ):
            kind(p.model, nn.HuberLoss(), p.params, p.data)


def test_exact_operators_with_a_loss_that_is_unknown() -> None:
    """The Hessian and the GGN need nothing but the loss itself: "mean" weighs batches by their size."""
    p = problem("mlp, mse")
    for loss, weigh in ((nn.HuberLoss(reduction="sum", delta=0.3), False), (nn.HuberLoss(delta=0.3), True)):
        twin = Problem(p.net, loss, p.data).reference()
        H = HessianLinearOperator(p.model, loss, p.params, p.data)
        assert weigh == (loss.reduction == "mean")
        close(H.to_dense(), twin.hessian())
        close(GGNLinearOperator(p.model, loss, p.params, p.data).to_dense(), twin.ggn())


def test_targets_that_do_not_fit() -> None:
    p = problem("mlp")
    for kind in CLASSIC:
        with says(ValueError, r"class index 3.*C = 3 classes", p.model):
            K = kind(p.model, p.loss, p.params, [(X, torch.full((6,), 3))])
            _ = K @ torch.ones(43).double()
        with says(ValueError, r"MSELoss needs a target of the output's shape \[6, 3\], got \[6\]", p.model):
            K = kind(p.model, nn.MSELoss(), p.params, [(X, torch.zeros(6).double())])
            _ = K @ torch.ones(43).double()


def test_nothing_counts() -> None:
    p = problem("mlp")
    for kind in CLASSIC:
        with says(ValueError, "No term of CrossEntropyLoss counts: every target is ignored", p.model):
            K = kind(p.model, p.loss, p.params, [(X, torch.full((6,), -100))])
            _ = K @ torch.ones(43).double()


# ---------------------------------------------------------------------------------------------------------------- data


def test_batches_of_unknown_form() -> None:
    p = problem("mlp")
    for item, words in (
        (X, "Batch 0 is a Tensor of length 6; expected a pair"),
        ((X, Y, Y), "Batch 0 is a tuple of length 3; expected a pair"),
        ({"x": X}, r"Batch 0 is a mapping with keys \['x'\]; expected a pair \(X, y\) or a mapping with 'labels'"),
        (3, "Batch 0 is a int; expected a pair"),
        ((torch.tensor(1.0), Y), "The input of batch 0 is a 0-d tensor"),
        ((["a", "b"], Y), "Can't tell how many examples batch 0 has: its input is a list. Pass `batch_size_fn`"),
    ):
        with says(ValueError, words, p.model):
            _ = curvature(risk(p.model, [item]), KFAC).trace
    with says(ValueError, "Batch 1 is a Tensor", p.model):
        _ = curvature(risk(p.model, [(X, Y), X]), KFAC).trace


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
def test_mappings_need_a_batch_size(kind: Any) -> None:
    p = problem("mapping")
    with says(ValueError, "dict-like custom data, `batch_size_fn` is required", p.model):
        kind(p.model, p.loss, p.params, p.data)


def test_outputs_of_unknown_form() -> None:
    p = problem("two outputs")
    for kind in CLASSIC:
        with says(ValueError, r"The model returned a tuple of length 2.*output=lambda o: o\[0\]", p.model):
            K = kind(p.model, p.loss, p.params, p.data)
            _ = K @ torch.ones(27).double()
        with says(ValueError, "`output` selected a tuple; expected the tensor", p.model):
            K = kind(p.model, p.loss, p.params, p.data, output=lambda out: out)
            _ = K @ torch.ones(27).double()

    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"score": super().forward(x), "other": x}

    model = nn.Sequential(Named(4, 3).double())
    with says(ValueError, r"returned a dict with fields \['score', 'other'\].*output=lambda o: o\['score'\]", model):
        _ = GGNLinearOperator(model, CE, list(model.parameters()), [(X, Y)])


def test_masks_of_another_form() -> None:
    p = problem("attention")
    for mask, words in (
        (lambda X, y: None, "`mask` returned NoneType; expected a bool tensor"),
        (
            lambda X, y: torch.ones(len(y), 3),
            r"`mask` returned torch.float32 \[3, 3\]; expected a bool tensor \[3, T\]",
        ),
        (lambda X, y: torch.ones(1, 3, dtype=torch.bool), r"`mask` returned torch.bool \[1, 3\]"),
    ):
        with says(ValueError, words, p.model):
            _ = curvature(p.risk(mask=mask), KFAC, vectors=MonteCarlo()).trace


def test_axes_that_do_not_exist() -> None:
    p = problem("time first")
    with says(
        ValueError,
        r"example_axis=\{'bdy': 1\} matches no module of the model; its modules are \['body', 'head'\]",
        p.model,
    ):
        p.risk(example_axis={"bdy": 1})


def test_mixed_dtypes_of_model_and_data() -> None:
    p = problem("mlp")
    data = [(X.float(), Y)]
    for kind in CLASSIC:
        with says(TypeError, "float32.*float64.*Convert the data or the model", p.model, data):
            K = kind(p.model, p.loss, p.params, data)
            _ = K @ torch.ones(43).double()


# --------------------------------------------------------------------------------------------------- what layers did


class Branch(nn.Module):
    """Calls what it is told to."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.first, self.second, self.run = nn.Linear(4, 5), nn.Linear(5, 3), run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def no_grad(self: Branch, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.first(x)
    return self.second(torch.tanh(h))


def in_place(self: Branch, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    out = self.first(h)
    h.mul_(2)
    return self.second(out) + h.sum(1, keepdim=True)


def half_detached(self: Branch, x: Tensor) -> Tensor:
    return self.second(torch.tanh(self.first(x)).detach())


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("vectors", [Exact(), MonteCarlo(2), ForwardOnly()], ids=lambda v: v.fisher_type)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_layers_did(approximation: Any, vectors: Any, frozen: bool) -> None:
    if isinstance(vectors, ForwardOnly) and approximation is not KFAC:
        return
    for run, words in (
        (lambda self, x: self.first(x)[:, :3], "layer 'second' .Linear. was never called in any batch"),
        (no_grad, r"layer 'first' ran under torch.no_grad\(\).*use_reentrant=False.*\['first.weight', 'first.bias'\]"),
        (in_place, "input of layer 'first' was modified in place after the layer read it.*x = x . y"),
        (
            half_detached,
            r"layer 'first' .Linear. does not reach the output in any batch.*\['first.weight', 'first.bias'\]",
        ),
    ):
        if run in (no_grad, half_detached) and isinstance(vectors, ForwardOnly):
            continue
        model = Branch(run).requires_grad_(not frozen)
        with says(ValueError, words, model):
            _ = curvature(risk(model, params=list(model.parameters())), approximation, vectors=vectors).trace


class Uses(nn.Module):
    """Uses parameters in its own way."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_weights_that_the_loss_s_output_reads(approximation: Any, frozen: bool) -> None:
    """Outside of the model there is no module that could be run again; `test_functions.py` has what is read inside."""
    model = Uses(lambda self, x: self.layer(x)).requires_grad_(not frozen)
    outside = risk(model, params=list(model.parameters()), output=lambda f: f / model.layer.weight.norm())
    with says(ValueError, "'layer.weight'.*outside.*read by `norm` in the selection of the output", model):
        _ = curvature(outside, approximation).trace


def test_weights_that_no_function_reads() -> None:
    model = Uses(lambda self, x: x[:, :4] * 1.0)
    with says(ValueError, "layer 'layer' .Linear. was never called in any batch", model):
        _ = curvature(risk(model), FullBlock).trace


def test_weights_computed_from_others() -> None:
    """A parametrized layer has the generic rule, for the parameters that its weight is computed from."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))).double()
    data = [(X[:3], Y[:3])]  # 3 examples, and a weight of 3 rows
    twin = Problem(NETS["mlp"](), CE, data)
    twin.net.model = model
    K = curvature(risk(model, data), FullBlock)
    close(K.to_dense(), twin.exact.only_blocks(twin.exact.ggn(), False))
    with pytest.warns(CurvatureWarning, match=r"'0' \(ParametrizedLinear.*weight normalization"):
        curvature(risk(model, data), KFAC)


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_options_of_embeddings(option: str) -> None:
    """Both change gradients only. The matrix is as without, or refused by name."""
    model = nn.Sequential(nn.Embedding(5, 3, **{option: True}), nn.Flatten(), nn.Linear(6, 3)).double()
    plain = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    plain.load_state_dict(model.state_dict())
    data = [(torch.tensor([[0, 0], [1, 0], [2, 3], [4, 4], [0, 1], [1, 1]]), Y)]
    twin = Problem(NETS["mlp"](), CE, data)
    twin.net.model = plain
    K = curvature(risk(model, data), FullBlock)
    close(K.to_dense(), twin.exact.only_blocks(twin.exact.ggn(), False))


def test_embeddings_that_scale_gradients_while_training() -> None:
    """Their gradients are the user's; curvature is that without the option, wherever it listens."""
    X = torch.tensor([[0, 0], [1, 0], [2, 3], [4, 4], [0, 1], [1, 1]])
    found, grads = [], []
    for scales in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=scales), nn.Flatten(), nn.Linear(6, 3)).double()
        for vectors in (Exact(), Empirical()):
            for inside in (False, True) if vectors == Empirical() else (False,):
                estimator = CurvatureEstimator(risk(model, ()), vectors=vectors)
                with estimator.listen((X, Y)):
                    loss = CE(model(X), Y)
                    if inside:
                        loss.backward()
                found.append(estimator.operator.to_dense())
        CE(model(X), Y).backward()
        grads.append(model[0].weight.grad)
        assert model[0].scale_grad_by_freq == scales
    torch.testing.assert_close(found[:3], found[3:], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(*grads)


def test_embedding_functions_that_scale_gradients() -> None:
    """Exact operators compute derivatives; layers refuse what is none, in words."""

    class Table(nn.Module):
        def __init__(self, scales: bool) -> None:
            super().__init__()
            self.table, self.last, self.scales = nn.Parameter(torch.randn(5, 3)), nn.Linear(6, 3), scales

        def forward(self, x: Tensor) -> Tensor:
            return self.last(nn.functional.embedding(x, self.table, scale_grad_by_freq=self.scales).flatten(1))

    X = torch.tensor([[0, 0], [1, 0], [2, 3], [4, 4], [0, 1], [1, 1]])
    models = [Table(scales).double() for scales in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    scaled, plain = (risk(model, [(X, Y)]) for model in models)
    for kind in (GGN, Hessian, Jacobian):
        close(kind(scaled).to_dense(), kind(plain).to_dense())
    with pytest.raises(UnsupportedError, match=r"layer .table"):
        curvature(scaled, KFAC)


def test_reentrant_checkpointing() -> None:
    class Segment(Branch):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
            return self.second(h)

    model = Segment(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedError, match=r"layer 'first' ran under torch.no_grad\(\).*use_reentrant=False"):
            _ = curvature(risk(model, [(X.clone(), Y)]), KFAC).trace


def test_a_frozen_model_with_in_place_activations_on_sequences_is_no_error() -> None:
    p = fresh("frozen sequence")
    assert not any(q.requires_grad for q in p.model.parameters())
    close(p.curvature(FullBlock).to_dense(), p.exact.only_blocks(p.exact.ggn(), False))


class First(nn.Module):
    """The first thing that a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def test_layers_that_return_several_tensors() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            return h.sin() + 1, {"rest": [h, None, 3, x.long()]}

    class Both(First):
        def forward(self, x: Tensor) -> Tensor:
            one, two = self.inner(x)
            return one * two["rest"][0]

    for model in (First(Pair(4, 3)).double(), Both(Pair(4, 3)).double()):
        twin = Problem(NETS["mlp"](), CE, [(X, Y)])
        twin.net.model = model
        for frozen in (False, True):
            model.requires_grad_(not frozen)
            K = curvature(risk(model, params=list(model.parameters())), FullBlock)
            close(K.to_dense(), twin.exact.ggn())


def test_layers_that_return_no_tensor() -> None:
    class Words(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return ["x"]

    model = First(Words(4, 3)).double()
    with says(NotImplementedError, r"layer 'inner' \(Words\) returned a list; expected floating-point tensors", model):
        _ = curvature(risk(model), DiagonalBlock).trace

    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            h = nn.functional.linear(x, 2 * self.weight, self.bias)  # a product with the weight itself would be a layer
            return nn.utils.rnn.pack_padded_sequence(h[:, None], torch.ones(len(x)), batch_first=True)

    model = First(Packed(4, 3)).double()
    with says(NotImplementedError, r"layer 'inner' \(Packed\) returned a PackedSequence.*Pad the sequences", model):
        _ = curvature(risk(model), DiagonalBlock).trace


def test_layers_whose_examples_are_elsewhere() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:  # [N, T, d]
            return self.body(x.transpose(0, 1)).transpose(0, 1).mean(1)

    model, x = Turned().double(), torch.randn(6, 5, 3).double()
    with says(
        UnsupportedError, r"layer 'body' \(Linear\) returned shape \[5, 6, 3\] in a batch of 6 examples: axis 0", model
    ):
        _ = curvature(risk(model, [(x, Y)]), KFAC).trace
    K = curvature(risk(model, [(x, Y)], example_axis={"body": 1}), FullBlock)
    twin = Problem(NETS["mlp"](), CE, [(x, Y)])
    twin.net.model = model
    twin.net.options = {"example_axis": {"body": 1}}
    close(K.to_dense(), twin.exact.only_blocks(twin.exact.ggn(), False))


class OneRow(nn.Module):
    """A layer gives [1, T, d], one row for all examples."""

    def __init__(self, layer: nn.Module, code: Tensor, use: Any) -> None:
        super().__init__()
        self.layer, self.head, self.use = layer, nn.Linear(4, 3), use
        self.register_buffer("code", code)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # [N, T, d]
        return self.head(self.use(x, self.layer(self.code))).mean(1)


ROWS = {
    "embedding": lambda: (nn.Embedding(5, 4), torch.arange(5)[None]),
    "linear": lambda: (nn.Linear(2, 4), torch.ones(1, 5, 2)),
}
SHARED_ROW = {
    "broadcast": lambda x, row: torch.tanh(x + row),
    "squeezed": lambda x, row: torch.tanh(x + row.squeeze(0)),
    "picked": lambda x, row: torch.tanh(x + row[0]),
    "summed": lambda x, row: torch.tanh(x + row.sum()),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("use", list(SHARED_ROW))
def test_one_row_for_all_examples_is_right_or_refused(row: str, use: str) -> None:
    model = OneRow(*ROWS[row](), SHARED_ROW[use])
    generator = torch.Generator().manual_seed(0)
    twin = Problem(NETS["mlp"](), CE, [(torch.randn(6, 5, 4, generator=generator).double(), Y)])
    twin.net.model = model
    exact = twin.reference()
    expected = exact.only_blocks(exact.ggn(), False)
    try:
        dense = curvature(risk(model, twin.data), FullBlock).to_dense()
    except UnsupportedError as error:
        words = str(error)
        assert "'layer'" in words
    else:
        close(dense, expected)


def test_affine_layers_that_get_the_examples_broadcast() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.code = nn.Linear(4, 3), nn.Linear(2, 3)
            self.query = nn.Buffer(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + self.code(self.query)

    model = Shared().double()
    with (
        unchanged(model),
        pytest.warns(CurvatureWarning, match=r"'the model' \(Shared: \['code.weight', 'code.bias'\]"),
    ):
        K = curvature(risk(model), KFAC)
    exact = GGNLinearOperator(model, CE, list(model.parameters()), [(X, Y)]).to_dense().diagonal()
    close(K.diagonal()[15:], exact[15:])


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (nn.BatchNorm1d(4, affine=False), r"\['inner'\] are batch norm in training mode.*model.eval"),
        (nn.Dropout(0.5), r"'inner' \(Dropout\).*model.eval"),
    ],
)
def test_batch_norm_and_dropout_inside_generic_layers(inner: nn.Module, words: str) -> None:
    class Noisy(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(4)), inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.scale)[:, :3]

    model = Noisy(inner).double()
    with says((NotImplementedError, RuntimeError), words, model):
        _ = curvature(risk(model), DiagonalBlock).trace


# ------------------------------------------------------------------------------------------------------------ numerics


@every_operator
def test_nan_in_an_input_names_layer_or_loss(kind: Any) -> None:
    p = problem("mlp")
    bad = X.clone()
    bad[2, 1] = torch.nan
    for check in (True, False):
        if not check and kind in EXACT:
            continue
        with says(NumericsError, "layer '0'.*statistic .* has NaN|The total loss is nan: an output or a", p.model):
            K = kind(p.model, p.loss, p.params, [(X, Y), (bad, Y)], check_deterministic=check)
            _ = K.trace if kind not in EXACT else None


def test_a_gradient_that_is_not_finite_while_the_forward_pass_is() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).sqrt()

    model = nn.Sequential(nn.Linear(4, 3), Root()).double()
    for approximation in (KFAC, EKFAC, DiagonalBlock, FullBlock):
        with says(NumericsError, r"layer '0': the statistic .* NaN or infinite entries", model):
            _ = curvature(risk(model), approximation, vectors=MonteCarlo()).trace


# ------------------------------------------------------------------------------------------------------ approximations


def test_keys_of_a_mapping_that_match_nothing() -> None:
    p = problem("generic layers")
    for key, name in (("head", "'head'"), ("9*", r"'9\*'"), (nn.Conv2d, "Conv2d")):
        with says(ValueError, rf"No layer matches .*{name}.*\['0', '1', '2', '4'\].*'Linear'", p.model):
            curvature(p.risk(), {key: KFAC}, default=DiagonalBlock)


def test_what_is_no_approximation() -> None:
    p = problem("mlp")
    for wrong in ("kfac", 3, KFACLinearOperator, None):
        with says(ValueError, "is no approximation. Expected an Accumulator class such as KFAC", p.model):
            curvature(p.risk(), {"0": wrong})
        if wrong is not None:
            with says(ValueError, "is no approximation", p.model):
                curvature(p.risk(), wrong)
    with says(ValueError, "kfac_approx='shrink' is unknown; expected 'expand' or 'reduce'", p.model):
        _ = curvature(p.risk(), KFAC.using(kfac_approx="shrink")).trace


def test_kronecker_factors_asked_for_by_name_where_there_are_none() -> None:
    p = problem("generic layers")
    for kind in (KFAC, EKFAC):
        with says(
            UnsupportedError,
            rf"layer '1' \(LayerNorm\) can't have {kind.__name__}.*DiagonalBlock or FullBlock",
            p.model,
        ):
            curvature(p.risk(), {"1": kind}, default=DiagonalBlock)
    model = one_bias()
    with says(UnsupportedError, r"layer '2'.*shared by \['0', '2'\] as different matrices", model):
        curvature(risk(model), {"2": KFAC}, default=DiagonalBlock)


@pytest.mark.parametrize("name", [name for name, make in NETS.items() if make().fallback])
def test_layers_that_fall_back_are_said_in_a_line_and_listed_in_a_table(name: str) -> None:
    p = problem(name)
    with unchanged(p.model), pytest.warns(CurvatureWarning, match=r"DiagonalBlock") as caught:
        K = curvature(p.risk(), KFAC)
    (listing,) = [w for w in caught if "DiagonalBlock" in str(w.message)]
    words = str(listing.message)
    assert "\n" not in words
    assert words.startswith(f"{len(p.net.fallback)} of ")
    assert any((repr(layer) if layer else "the model") in words for layer in p.net.fallback)
    assert "Print the operator for a table" in words
    assert listing.filename == __file__, "the warning points at the user's line"
    lines = {line.split()[0]: line for line in repr(K).splitlines()[2:]}
    reasons = repr(K).splitlines()[1].index("why no Kronecker factors")
    for layer in p.net.fallback:
        assert "DiagonalBlock" in lines[layer or "(model)"]
        assert len(lines[layer or "(model)"][reasons:]) > 20


def test_norms_without_kronecker_factors_are_told_once_per_process() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.LayerNorm(3)).double()
    with pytest.warns(CurvatureWarning, match=r"^2 of 4 layers get .*, such as '1' \(LayerNorm: "):
        curvature(risk(model), KFAC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(curvature(risk(model), EKFAC)).count("is not that of an affine layer") == 2
    with pytest.warns(CurvatureWarning, match=r"1 of 2 layers get .*: '0' \(PReLU: "):  # others are told each time
        curvature(risk(nn.Sequential(nn.PReLU(), nn.Linear(4, 3)).double()), KFAC)


def test_the_warning_of_the_classic_door_points_at_the_user_s_line() -> None:
    p = problem("lstm")
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        with warnings.catch_warnings():
            warnings.simplefilter("error", CurvatureWarning)  # the plan is final when the data were seen
            K = kind(p.model, p.loss, p.params, p.data, check_deterministic=False)
        with pytest.warns(CurvatureWarning, match="get their exact diagonal") as caught:
            _ = K @ torch.ones(K.shape[1], dtype=K.dtype)
        assert [w.filename for w in caught] == [__file__]


def one_bias() -> nn.Sequential:
    """Two layers with weights of their own and one bias: there is no common matrix."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].bias = model[0].bias
    return model


def test_reasons_for_falling_back() -> None:
    with pytest.warns(CurvatureWarning, match=r"shared by \['0', '2'\]"):
        curvature(risk(one_bias()), KFAC)
    with pytest.warns(CurvatureWarning, match="LayerNorm: its rule LayerNormRule is not that of an affine layer"):
        curvature(problem("generic layers").risk(), KFAC)


def test_options_that_make_a_layer_fall_back_are_named() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3, mode="max"), nn.Linear(3, 3)).double()
    with pytest.warns(CurvatureWarning, match="max"):
        curvature(risk(model, [(torch.randint(5, (6, 2)), Y)]), KFAC)


def test_forward_only_has_no_gradients() -> None:
    p = problem("mlp")
    for kind in (DiagonalBlock, FullBlock):
        with says(
            UnsupportedError,
            rf"layer '0': {kind.__name__} is made of gradients, and ForwardOnly\(\) sends nothing",
            p.model,
        ):
            _ = curvature(p.risk(), kind, vectors=ForwardOnly()).trace
    generic = problem("generic layers")
    with (
        warnings.catch_warnings(),
        says(UnsupportedError, r"layer '1'.*leave the layer's parameters \['1.weight', '1.bias'\] out", generic.model),
    ):
        warnings.simplefilter("ignore", CurvatureWarning)
        _ = curvature(generic.risk(), KFAC, vectors=ForwardOnly()).trace


def test_ekfac_needs_gradients() -> None:
    p = problem("mlp")
    with says(NotImplementedError, r"ForwardOnly\(\) sends nothing", p.model):
        _ = curvature(p.risk(), EKFAC, vectors=ForwardOnly()).trace


def test_full_blocks_that_are_too_large() -> None:
    p = problem("mlp")
    with says(
        UnsupportedError,
        r"layer '0': its full block is 25 x 25.*above max_bytes=4000.*FullBlock.using\(max_bytes",
        p.model,
    ):
        _ = curvature(p.risk(), FullBlock.using(max_bytes=4000)).trace


def test_exact_vectors_say_once_what_they_cost() -> None:
    p = problem("attention")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        curvature(p.risk(), KFAC).compute()
    assert len(caught) == 1
    assert caught[0].category is CurvatureWarning
    assert "Exact() sends 6 vectors per batch: 3 loss terms per example" in str(caught[0].message)
    assert "times 2 columns" in str(caught[0].message)


def test_monte_carlo_needs_samples() -> None:
    for samples in (0, -1):
        with pytest.raises(ValueError, match=f"at least one sample, got samples={samples}"):
            MonteCarlo(samples)


def test_factors_that_are_too_large() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    with says(
        UnsupportedError, r"layer '0': its factor A is 5 x 5, 0.0 GiB, above max_bytes=100. Use KFAC or EKFAC", model
    ):
        _ = curvature(risk(model), TNT.using(max_bytes=100)).trace


def test_accumulators_of_the_user_s_own() -> None:
    p = problem("generic layers")

    class Affine(Accumulator):
        def update(self, batch: Any) -> None:
            self.add("a", batch.rows.inputs.sum((0, 1)))

        def finish(self) -> Any:
            return self.value("nothing")

    norm = EmpiricalRisk(p.model, p.loss, p.data, [p.model[1].weight, p.model[1].bias])
    with says(UnsupportedError, r"layer '1' \(LayerNorm\) has no affine rule.*@register_rule\(LayerNorm\)", p.model):
        _ = curvature(norm, Affine).trace
    model = one_bias()
    with says(UnsupportedError, r"layer '0' \(Linear\) is shared by several modules", model):
        _ = curvature(risk(model), Affine, vectors=MonteCarlo()).trace
    tied = problem("tied")
    with says(UnsupportedError, r"layer 'embedding': its parameter is multiplied with in 2 roles by", tied.model):
        _ = curvature(tied.risk(), Affine, vectors=MonteCarlo()).trace
    with says(KeyError, "layer '0': nothing was added to 'nothing' yet", problem("mlp").model):
        _ = curvature(problem("mlp").risk(), Affine).trace

    class Whole(Accumulator):
        per_group = False

        def update(self, batch: Any) -> None:
            _ = batch.per_example_grads

        def finish(self) -> Any:
            raise AssertionError

    with says(ValueError, "layer '1' has 2 blocks: restrict the batch to one of them", p.model):
        _ = curvature(norm, Whole, separate_weight_and_bias=True).trace


def test_merging_accumulators_of_different_kinds() -> None:
    made: list[Any] = []

    class Kept(DiagonalBlock):
        def finish(self) -> Any:
            made.append(self)
            return super().finish()

    for name in ("mlp", "linear"):
        _ = curvature(problem(name).risk(), Kept).trace
    first, second, other = made
    for wrong in (second, other):
        with pytest.raises(
            ValueError, match=r"Can't merge accumulators of different kind: Kept of layer '0'.*Kept of layer"
        ):
            first.merge(wrong)
    state = first.state_dict()
    with pytest.raises(ValueError, match=r"state of layer '0' lacks \['counts'\]; is the file cut off"):
        first.load_state_dict({k: v for k, v in state.items() if k != "counts"})


# -------------------------------------------------------------------------------------------------------- classic door


def test_options_of_kfac() -> None:
    p = problem("mlp")
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        for options, words in (
            ({"fisher_type": "forward"}, "Invalid fisher_type: 'forward'. Supported by .*'mc'"),
            ({"kfac_approx": "shrink"}, r"Invalid kfac_approx: 'shrink'. Supported: \['expand', 'reduce'\]"),
            ({"fisher_type": "empirical", "mc_samples": 2}, "Invalid mc_samples: 2.*'empirical' draws nothing"),
            ({"mc_samples": 0}, "at least one sample"),
        ):
            with says(ValueError, words, p.model):
                kind(p.model, p.loss, p.params, p.data, **options)
    with says(ValueError, "Invalid fisher_type: .*forward-only.*Supported by EKFACLinearOperator", p.model):
        EKFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type="forward-only")


def test_options_of_the_inverse() -> None:
    p = problem("mlp")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data)
    E = EKFACLinearOperator(p.model, p.loss, p.params, p.data)
    G = GGNLinearOperator(p.model, p.loss, p.params, p.data)
    for A, options, words in (
        (G, {}, "must be an instance of `KFACLinearOperator`, got GGNLinearOperator"),
        (
            K,
            {"use_heuristic_damping": True, "use_exact_damping": True},
            "Either use heuristic damping or exact damping",
        ),
        (K, {"damping": (1.0, 1.0), "use_exact_damping": True}, "require a single damping value"),
        (K, {"damping": (1.0, 1.0), "use_heuristic_damping": True}, "require a single damping value"),
        (E, {"damping": 1.0}, "Only exact damping is supported for EKFAC"),
        (E, {"damping": (1.0, 1.0)}, "Only exact damping is supported for EKFAC"),
        (E, {"damping": 1.0, "use_heuristic_damping": True}, "Only exact damping is supported for EKFAC"),
    ):
        with says(ValueError, words, p.model):
            KFACInverseLinearOperator(A, **options)
    with says(ValueError, "require a single damping value", p.model):
        K.inverse(damping=(1.0, 1.0), use_heuristic_damping=True)
    with says(ValueError, "negative|at least 0", p.model):
        K.inverse(damping=-1.0)
    inverse = KFACInverseLinearOperator(K, damping=0.1)
    with pytest.raises(ValueError, match=r"lacks \['A', 'damping'"):
        inverse.load_state_dict({})
    cut = {k: v for k, v in inverse.state_dict().items() if k != "cache"}
    with pytest.raises(ValueError, match=r"lacks \['cache'\]"):
        KFACInverseLinearOperator.from_state_dict(cut, K)


def test_factors_can_be_replaced_and_not_removed() -> None:
    p = problem("mlp")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data)
    with pytest.raises(TypeError, match="replaced, not removed"):
        del K.input_covariances["0"]
    with pytest.raises(KeyError, match="7"):
        _ = K.input_covariances["7"]
    with pytest.raises(ValueError, match=r"block \"0|layer '0'|square"):
        K.input_covariances["0"] = torch.ones(3, 3).double()
    close(K.trace, KFACLinearOperator(p.model, p.loss, p.params, p.data).trace)


def test_strategies_of_the_eigenvalue_correction() -> None:
    g = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match=r"Invalid _force_strategy: 'fast'. Supported"):
        compute_eigenvalue_correction_linear_weight_sharing(g, torch.eye(1), g, torch.eye(1), _force_strategy="fast")


# -------------------------------------------------------------------------------------------------------------- verify


def test_verify_names_a_wrong_rule() -> None:
    class MyLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x @ self.kernel

    @register_rule(MyLinear)
    class Forgetful(AffineRule):
        def patterns(self, module: Any) -> dict[str, str]:
            return {"kernel": "i o -> o i"}

        def inputs(self, module: Any, x: Tensor) -> Tensor:
            return x[:, None]

        def grads(self, module: Any, g: Tensor) -> Tensor:
            return g[:, :, None]

    model = nn.Sequential(MyLinear()).double()
    with says(VerificationError, r"layer '0', check \(a\) gradients.*differ from plain autodiff", model):
        curvature(risk(model, check=False), KFAC).verify()
    with says(UnsupportedError, r"layer '0' \(MyLinear\).*by the layer's rule and .* by autograd", model):
        curvature(risk(model), KFAC)


def test_verify_notices_mixed_examples() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(4, 5), Mixes(), nn.Linear(5, 3)).double()
    with says(VerificationError, "layer '0', check", model):
        BlockwiseLinearOperator(risk(model), KFAC, compute=False).verify()


def test_verify_notices_a_wrong_likelihood() -> None:
    from curvlinops_plus import FromDistribution, register_likelihood

    class Scaled(nn.Module):
        reduction = "mean"

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return 3 * nn.functional.mse_loss(f, y)

    register_likelihood(Scaled)(lambda loss: FromDistribution(lambda f: torch.distributions.Normal(f, 1.0)))
    p = problem("mlp, mse")
    with says(VerificationError, r"check \(c\) loss Hessian", p.model):
        curvature(risk(p.model, p.data, Scaled()), KFAC).verify()


def test_verify_needs_data_of_its_own() -> None:
    p = problem("mlp")
    with says(ValueError, r"iterator.*`verify\(\)` needs a few examples of its own", p.model):
        curvature(p.risk(data=iter(p.data)), KFAC).verify()


def test_a_rule_that_gives_other_shapes() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.kernel

    @register_rule(Odd)
    class OddRule(LayerRule):
        def patterns(self, module: Any) -> dict[str, str]:
            return {"weight": "i o -> o i"}

    model = nn.Sequential(Odd()).double()
    with says(ValueError, r"OddRule.patterns names \['weight'\], but Odd has the parameters \['kernel'\]", model):
        curvature(risk(model), DiagonalBlock)
