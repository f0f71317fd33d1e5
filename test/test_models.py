"""Whole networks as people use them, in evaluation mode: every layer against plain autograd, one example at a time.

The transformers and PEFT are skipped where their packages are absent: pip install -e ".[models,test]"
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers import Written
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    DiagonalBlock,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    KFACLinearOperator,
    MonteCarlo,
    UnsupportedError,
    curvature,
)

# Norms, recurrent layers and bare parameters have no Kronecker factors; a warning says so, and `exact_diagonal` too.
pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal:curvlinops_plus.errors.CurvatureWarning")

Batch = Any
"""`(X, y)`, or a mapping with "labels"."""


# ------------------------------------------------------------------------------------------------ problem and its twin
@dataclass(eq=False)
class Problem:
    """A model, its loss and data, and what plain PyTorch needs to know of them.

    Attributes:
        model: In evaluation mode.
        data: A few batches.
        without_factors: Type names of the modules that have no Kronecker factors.
        options: Of `EmpiricalRisk`.
        params: Names of the parameters looked at, None for all.
        loss: With reduction "mean".
    """

    model: nn.Module
    data: list[Batch]
    without_factors: set[str] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)
    params: list[str] | None = None
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)

    @property
    def tracked(self) -> dict[str, nn.Parameter]:
        named = dict(self.model.named_parameters())
        return named if self.params is None else {name: named[name] for name in self.params}

    @property
    def risk(self) -> EmpiricalRisk:
        return EmpiricalRisk(self.model, self.loss, self.data, self.tracked, **self.options)

    def to(self, dtype: torch.dtype) -> Problem:
        """The same in another precision."""
        data = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, self.data)
        return replace(self, model=copy.deepcopy(self.model).to(dtype), data=data)

    # ------------------------------------------------------------------------- the twin: nothing of the package
    def output(self, batch: Batch) -> Tensor:
        """What the loss reads, classes last."""
        given = {k: v for k, v in batch.items() if k != "labels"} if isinstance(batch, Mapping) else None
        found = self.model(batch[0]) if given is None else self.model(**given)
        return getattr(found, "logits", found)

    def value(self, batch: Batch, reduction: str) -> Tensor:
        """The loss of one batch."""
        f, y = self.output(batch), batch["labels"] if isinstance(batch, Mapping) else batch[1]
        if self.options.get("shift_labels"):
            f, y = f[:, :-1], y[:, 1:]
        loss = copy.deepcopy(self.loss)
        loss.reduction = reduction
        if isinstance(loss, nn.CrossEntropyLoss):
            f, y = f.flatten(0, -2), y.flatten()
        return loss(f.float() if f.dtype == torch.bfloat16 else f, y.to(f.dtype) if y.is_floating_point() else y)

    def examples(self, batch: Batch) -> list[Batch]:
        """A batch for each example."""
        if isinstance(batch, Mapping):
            return [{k: v[n : n + 1] for k, v in batch.items()} for n in range(len(batch["labels"]))]
        return [(x[None], y[None]) for x, y in zip(*batch, strict=True)]

    @cache  # noqa: B019 (problems live as long as the tests)
    def gradients(self) -> dict[str, Tensor]:
        """Name to gradients of every example's summed loss terms, [N, *shape], divided by the root of the divisor.

        Their sum of outer products is the empirical Fisher matrix.
        """
        divisor = sum((self.value(batch, "sum") / self.value(batch, "mean")).item() for batch in self.data)
        names, params = list(self.tracked), list(self.tracked.values())
        found: list[list[Tensor]] = []
        for batch in self.data:
            for example in self.examples(batch):
                loss = self.value(example, "sum")
                grads = torch.autograd.grad(loss, params, allow_unused=True)
                found.append([torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)])
        scale = divisor**-0.5
        return {name: torch.stack(J).double() * scale for name, J in zip(names, zip(*found, strict=True), strict=True)}

    def __hash__(self) -> int:
        return id(self)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype, what: str, least: float = 0.0) -> None:
    """Relative error in the norm (of a size `least` at least), within what the precision of the model allows."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    got, expected = got.detach().double(), expected.detach().double()
    error, size = float((got - expected).norm()), max(float(expected.norm()), least)
    assert error <= tolerance * size, f"{what}: off by {error / (size or 1):.1e} of {size:.3g}"


def traces(problem: Problem, K: BlockwiseLinearOperator) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer name to the trace of its blocks, and the sum of squared gradients of its parameters."""
    names, found = list(problem.tracked), {}
    for layer, positions in K.mapping.items():
        mine = [names[at] for at in sorted(set(positions.values()))]
        blocks = {layer, *mine} & set(K.blocks)
        trace = torch.stack([K.blocks[name].trace.double() for name in blocks]).sum()
        found[layer] = trace, torch.stack([problem.gradients()[name].square().sum() for name in mine]).sum()
    return found


def exact_diagonal(K: BlockwiseLinearOperator) -> set[str]:
    """Type names of modules whose layers fell back to the exact diagonal."""
    modules = dict(K.risk.model.named_modules())
    return {type(modules[e.layer.name]).__name__ for e in K.plan if issubclass(e.approximation.kind, DiagonalBlock)}


# ------------------------------------------------------------------------------------------------- networks of PyTorch


def inverted_residual(d: int) -> nn.Module:
    """Expand, convolve each channel by itself, weigh channels by what is in the image, project."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.act(m.bn1(m.expand(x)))
        h = m.act(m.bn2(m.depthwise(h)))
        h = h * m.gate(m.act(m.reduce(h.mean((2, 3), keepdim=True)))).sigmoid()
        return x + m.bn3(m.project(h))

    e = 2 * d
    return Written(
        forward, expand=nn.Conv2d(d, e, 1, bias=False), bn1=nn.BatchNorm2d(e), act=nn.SiLU(inplace=True),
        depthwise=nn.Conv2d(e, e, 3, padding="same", groups=e, bias=False), bn2=nn.BatchNorm2d(e),
        reduce=nn.Conv2d(e, 2, 1), gate=nn.Conv2d(2, e, 1), project=nn.Conv2d(e, d, 1, bias=False),
        bn3=nn.BatchNorm2d(d),
    )  # fmt: skip


def depthwise_separable() -> Problem:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.SiLU(inplace=True))
    grouped = nn.Conv2d(4, 6, 3, groups=2)
    model = nn.Sequential(
        stem, inverted_residual(4), grouped, nn.Hardswish(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip
    return Problem(lived_in(model), images(3, 12, 3), {"BatchNorm2d"})


def text_model(**options: Any) -> nn.Module:
    """Token and position embeddings, `nn.TransformerEncoder`, mean over the tokens that are there."""

    def forward(m: Any, tokens: Tensor, padding: Tensor) -> Tensor:
        x = m.tokens(tokens) + m.positions(torch.arange(tokens.shape[1])[None])
        x = m.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return m.head(x.sum(1) / (~padding).sum(1, keepdim=True))

    tables = {"tokens": nn.Embedding(20, 8, padding_idx=0), "positions": nn.Embedding(10, 8)}
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True, **options)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return lived_in(Written(forward, **tables, encoder=encoder, head=nn.Linear(8, 3)))


def padded(vocab: int, T: int, classes: int) -> list[dict[str, Tensor]]:
    """Sentences of different lengths in two batches, "padding" where there is none."""
    batches = []
    for N in (3, 2):
        tokens = torch.randint(1, vocab, (N, T))
        padding = torch.arange(T) >= torch.randint(2, T + 1, (N, 1))
        batches.append(
            {"tokens": tokens.masked_fill(padding, 0), "padding": padding, "labels": torch.randint(classes, (N,))}
        )
    return batches


def kept(X: Any, y: Any) -> Tensor:
    return ~X["padding"]


def text_encoder() -> Problem:
    return Problem(text_model(), padded(20, 6, 3), {"LayerNorm"}, {"mask": kept})


def images(channels: int, size: int, classes: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(N, channels, size, size), torch.randint(classes, (N,))) for N in (3, 2)]


def lived_in(model: nn.Module) -> nn.Module:
    """Evaluation mode, norms and biases away from their initial ones and zeros, as after training."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and (name.endswith("running_var") or (tensor == 1).all()):
            tensor.data.uniform_(0.5, 1.5)
        elif tensor.is_floating_point() and (tensor == 0).all():
            tensor.data.normal_(0, 0.3)
    return model.eval()


def vectors(*shape: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(N, *shape), torch.randint(3, (N,))) for N in (3, 2)]


NETWORKS: dict[str, Callable[[], Problem]] = {
    "depthwise separable": depthwise_separable,
    "text encoder": text_encoder,
}


# --------------------------------------------------------------------------------------- networks of transformers, PEFT
def sentences(vocab: int, T: int) -> list[dict[str, Tensor]]:
    """Token ids with right padding, two batches."""
    batches = []
    for N in (3, 2):
        length = torch.randint(3, T + 1, (N, 1))
        here = torch.arange(T) < length
        ids = torch.randint(1, vocab, (N, T)).masked_fill(~here, 0)
        batches.append({"input_ids": ids, "attention_mask": here.long()})
    return batches


def attended(X: Any, y: Any) -> Tensor:
    return X["attention_mask"].bool()


def gpt2() -> Problem:
    """Language model with a tied head; padding is ignored by the loss and masked in every layer."""
    transformers = quiet_transformers()
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    data = [b | {"labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)} for b in sentences(40, 7)]
    model, options = lived_in(transformers.GPT2LMHeadModel(config)), {"shift_labels": True, "mask": attended}
    assert model.lm_head.weight is model.transformer.wte.weight
    return Problem(model, data, {"LayerNorm"}, options)


def bert_config() -> Any:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 12}
    return quiet_transformers().BertConfig(vocab_size=40, hidden_size=16, num_labels=3, **layers)


def bert_classifier() -> Problem:
    model = lived_in(quiet_transformers().BertForSequenceClassification(bert_config()))
    data = [b | {"labels": torch.randint(3, (len(b["input_ids"]),))} for b in sentences(40, 7)]
    return Problem(model, data, {"LayerNorm"}, {"mask": attended})


def bert_masked_lm() -> Problem:
    """A third of the tokens is masked and to be found; the decoder's weight is the embedding's, its bias its own."""
    model = lived_in(quiet_transformers().BertForMaskedLM(bert_config()))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    data = []
    for b in sentences(40, 7):
        hidden = (torch.arange(7) % 3 == 1) & b["attention_mask"].bool()
        ids = b["input_ids"]
        data.append(b | {"input_ids": ids.masked_fill(hidden, 39), "labels": ids.masked_fill(~hidden, -100)})
    return Problem(model, data, {"LayerNorm"}, {"mask": attended, "shift_labels": False})


def lora() -> Problem:
    """GPT-2, frozen, with low-rank corrections of its attention layers."""
    quiet_transformers()
    peft = pytest.importorskip("peft", reason='PEFT is absent: pip install -e ".[models]"')
    base = gpt2()
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.1)
    model = lived_in(peft.get_peft_model(base.model, config))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    return Problem(model, base.data, set(), base.options, params=trained)


def quiet_transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    transformers = pytest.importorskip("transformers", reason='transformers is absent: pip install -e ".[models]"')
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


TRANSFORMERS: dict[str, Callable[[], Problem]] = {
    "gpt2": gpt2,
    "bert classifier": bert_classifier,
    "bert masked lm": bert_masked_lm,
    "gpt2 with lora": lora,
}


@cache
def problem(name: str, dtype: torch.dtype) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (NETWORKS | TRANSFORMERS)[name]().to(dtype)


names = pytest.mark.parametrize("name", [*NETWORKS, *(pytest.param(n, marks=pytest.mark.slow) for n in TRANSFORMERS)])
DTYPES = torch.float64, torch.float32, torch.bfloat16
every = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (name in TRANSFORMERS or dtype != torch.float64))
        for name in [*NETWORKS, *TRANSFORMERS]
        for dtype in DTYPES
    ],
)


# --------------------------------------------------------------------------------------------------------------- tests
@every
def test_every_layer(name: str, dtype: torch.dtype) -> None:
    """It passes its checks; EKFAC has its exact trace; the diagonal is exact."""
    given = problem(name, dtype)
    found = curvature(given.risk, EKFAC, vectors=MonteCarlo(1, seed=0)).verify()
    K = curvature(given.risk, EKFAC, vectors=Empirical())
    assert {row[0] for row in found.rows} == {e.layer.name or "(model)" for e in K.plan} | {"(model)"}
    assert exact_diagonal(K) == given.without_factors
    for layer, (trace, exact) in traces(given, K).items():
        close(trace, exact, dtype, layer)
        assert float(exact) > 0, layer
    got = given.risk.space.unflatten(curvature(given.risk, DiagonalBlock, vectors=Empirical()).diagonal())
    squares = {key: J.square().sum(0) for key, J in given.gradients().items()}
    largest = max(float(square.norm()) for square in squares.values())
    for key, square in squares.items():  # keys' biases have no influence on a softmax: their gradients are rounding
        close(got[key], square, dtype, key, least=1e-9 * largest)


@names
def test_classic_door(name: str) -> None:
    """The constructors' own defaults: a block for every parameter, computed at once, checked for determinism."""
    given = problem(name, torch.float64)
    arguments = given.model, given.loss, list(given.tracked.values()), given.data
    exact = torch.stack([J.square().sum() for J in given.gradients().values()]).sum()
    corrected = EKFACLinearOperator(*arguments, fisher_type="empirical", **given.options)
    close(corrected.trace, exact, torch.float64, "trace")
    K = KFACLinearOperator(*arguments, fisher_type="empirical", **given.options)
    for operator in (corrected, K):
        v = torch.randn(K.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        Kv = operator @ v
        assert float(v @ Kv) > 0
        close(operator.inverse(damping=0.1) @ (Kv + 0.1 * v), v, torch.float64, "inverse")


"""Cents above 10 Hz."""


@pytest.mark.slow
def test_what_models_do_with_labels() -> None:
    """A causal model with prompts alone in front, and models that make inputs of their decoder from labels."""
    transformers = quiet_transformers()
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    ids = torch.randint(3, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:4] = -100
    causal = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_layer=1, n_head=1, n_embd=4, n_positions=8)
    )
    causal, loss = lived_in(causal).double(), nn.CrossEntropyLoss()
    for batch in ({"input_ids": ids, "labels": labels}, {"input_ids": ids.flip(0), "labels": labels.flip(0)}):
        risk = EmpiricalRisk(causal, loss, [batch])
        assert abs(risk.loss() - causal(**batch).loss) < 1e-6  # its own takes logits in single precision
        assert curvature(risk, KFAC, vectors=MonteCarlo(1, seed=0)).verify().rows
    sizes = {"d_model": 4, "encoder_ffn_dim": 4, "decoder_ffn_dim": 4, "max_position_embeddings": 8, "init_std": 0.5}
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=11, **sizes, **special))
    sizes = {"d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=11, **sizes, **special))
    for model, words in ((bart, "BartFor.*depend on `labels`"), (t5, "T5For.*fails without `labels`")):
        model.double().eval()
        for targets in (ids.flip(1), ids[:, :4].clone()):
            batch = {"input_ids": ids, "labels": targets}
            with pytest.raises(UnsupportedError, match=words + ".*decoder_input_ids"):
                EmpiricalRisk(model, loss, [batch]).loss()
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(targets)
            assert abs(EmpiricalRisk(model, loss, [batch]).loss() - model(**batch).loss) < 1e-6
