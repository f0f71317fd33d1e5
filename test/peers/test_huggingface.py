"""Models of transformers and PEFT as they come: what docs/huggingface.md says holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    Empirical,
    EmpiricalRisk,
    Exact,
    KFACOptimizer,
    MonteCarlo,
    UnsupportedError,
    curvature,
)

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
transformers = pytest.importorskip(
    "transformers", reason='transformers is absent: pip install -e ".[models]"'
)
transformers.utils.logging.set_verbosity_error()

V, T = 24, 8
LOSS = nn.CrossEntropyLoss()
pytestmark = pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")


@pytest.fixture(autouse=True)
def _seed() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def language_model(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": V}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **options)
    )
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.to(dtype).eval()


def batch(N: int, lengths: Tensor | None = None, T: int = T) -> dict[str, Tensor]:
    """Token ids with right padding, and labels for all tokens."""
    lengths = torch.randint(3, T + 1, (N,)) if lengths is None else lengths
    here = torch.arange(T) < lengths[:, None]
    ids = torch.randint(1, V, (N, T)) * here
    return {"input_ids": ids, "attention_mask": here.long(), "labels": ids.masked_fill(~here, -100)}


def padded(b: dict[str, Tensor], more: int) -> dict[str, Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {key: nn.functional.pad(value, (0, more), value=fill[key]) for key, value in b.items()}


def attended(X: Any, y: Any) -> Tensor:
    return X["attention_mask"].bool()


def risk_of(model: nn.Module, data: list[dict[str, Tensor]], **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, LOSS, data, mask=attended, **options)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_the_matrix_does_not_depend_on_padding(approximation: Any) -> None:
    model, data = language_model(), [batch(3), batch(2)]
    K = curvature(risk_of(model, data), approximation, vectors=Empirical())
    L = curvature(risk_of(model, [padded(b, 5) for b in data]), approximation, vectors=Empirical())
    v = torch.randn(K.shape[1], dtype=torch.float64)
    torch.testing.assert_close(L @ v, K @ v, rtol=1e-9, atol=1e-12)
    without = curvature(
        EmpiricalRisk(model, LOSS, [padded(b, 5) for b in data]), KFAC, vectors=Empirical()
    )
    assert not torch.allclose(
        without @ v, curvature(risk_of(model, data), KFAC, vectors=Empirical()) @ v, rtol=1e-3
    )


def test_loss_and_gradient_are_those_of_the_model() -> None:
    """With one batch the model's own loss from `labels` is the risk; its GGN follows the same
    shift.
    """
    model, b = language_model(), batch(4)
    own = model(**b).loss
    gradient = torch.autograd.grad(own, list(model.parameters()))
    risk = risk_of(model, [b])
    assert abs(float(risk.loss() - own.detach())) < 1e-6  # its own takes logits in single precision
    for mine, theirs in zip(risk.gradient().values(), gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    said = risk_of(model, [b], shift_labels=True)
    v = torch.randn(GGN(risk).shape[1], dtype=torch.float64)
    torch.testing.assert_close(GGN(risk) @ v, GGN(said) @ v)


def adapted(**options: Any) -> nn.Module:
    """GPT-2 with low-rank corrections that have been trained a little."""
    peft = pytest.importorskip("peft", reason='PEFT is absent: pip install -e ".[models]"')
    config = peft.LoraConfig(
        **{"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True} | options
    )
    model = peft.get_peft_model(language_model(), config).double().eval()
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.3)
    return model


KINDS = {
    "plain": ({}, {"EKFAC"}),
    "rank-stabilised": ({"use_rslora": True}, {"EKFAC"}),
    "biases": ({"bias": "all"}, {"EKFAC", "DiagonalBlock"}),
    "norms": ({"modules_to_save": ["ln_f"]}, {"EKFAC", "DiagonalBlock"}),
    "embedding": ({"target_modules": ["wte"]}, {"EKFAC", "DiagonalBlock"}),
    "magnitudes": ({"use_dora": True}, {"DiagonalBlock", "EKFAC"}),
}


def exact_trace(model: nn.Module, b: dict[str, Tensor], shifted: bool) -> float:
    """Of the empirical Fisher, by autograd of one example at a time."""
    params, count, total = [p for p in model.parameters() if p.requires_grad], 0, 0.0
    for n in range(len(b["labels"])):
        example = {key: value[n : n + 1] for key, value in b.items()}
        labels = example.pop("labels")
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifted else labels
        count += int((labels >= 0).sum())
        logits = model(**example).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        total += sum(float(g.square().sum()) for g in grads if g is not None)
    return total / count


@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind: str) -> None:
    """Traces are those of autograd for every kind, and the table of the page says which blocks they
    are.
    """
    options, expected = KINDS[kind]
    model, b = adapted(**options), batch(4)
    K = curvature(risk_of(model, [b]), EKFAC, vectors=Empirical())
    assert K.shape[1] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert float(K.trace) == pytest.approx(exact_trace(model, b, True), rel=1e-6)
    assert {name for name in ("EKFAC", "DiagonalBlock") if f"  {name}  " in str(K)} == expected
    assert K.verify().rows


@pytest.mark.parametrize("kind", ["GPT2LMHead", "BertForSequenceClassification", "BertForMaskedLM"])
def test_traces_of_models(kind: str) -> None:
    """Heads that share the embedding's weight, poolers, tokens that are masked and to be found."""
    b = batch(4)
    if kind == "GPT2LMHead":
        model, shifted = language_model(), True
    else:
        sizes = {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            "hidden_size": 8,
        }
        config = transformers.BertConfig(
            vocab_size=V, num_labels=3, max_position_embeddings=12, **sizes
        )
        model, shifted = getattr(transformers, kind)(config).double().eval(), False
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        if "Sequence" in kind:
            b["labels"] = torch.arange(4) % 3
    K = curvature(risk_of(model, [b], shift_labels=shifted), EKFAC, vectors=Empirical())
    assert float(K.trace) == pytest.approx(exact_trace(model, b, shifted), rel=1e-6)
    assert K.verify().rows


@pytest.mark.slow
def test_what_models_do_with_labels() -> None:
    """A causal model with prompts alone in front, and models that make inputs of their decoder from
    labels.
    """
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    ids = torch.randint(3, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:4] = -100
    causal = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_layer=1, n_head=1, n_embd=4, n_positions=8)
    )
    causal, loss = causal.double().eval(), nn.CrossEntropyLoss()
    for p in causal.parameters():
        nn.init.normal_(p, std=0.3)
    for batch in (
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids.flip(0), "labels": labels.flip(0)},
    ):
        risk = EmpiricalRisk(causal, loss, [batch])
        assert (
            abs(risk.loss() - causal(**batch).loss) < 1e-6
        )  # its own takes logits in single precision
        assert curvature(risk, KFAC, vectors=MonteCarlo(1, seed=0)).verify().rows
    sizes = {
        "d_model": 4,
        "encoder_ffn_dim": 4,
        "decoder_ffn_dim": 4,
        "max_position_embeddings": 8,
        "init_std": 0.5,
    }
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=11, **sizes, **special)
    )
    sizes = {"d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1}
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=11, **sizes, **special)
    )
    other, short = ids.flip(1), ids[:, :4].clone()
    for model, said in (
        (
            bart,
            [
                "BartFor.*If its outputs depend on them, give.*decoder_input_ids",
                r"got a target of shape \[8, 4\]",
            ],
        ),
        (t5, ["T5For.*fails without `labels`.*decoder_input_ids"] * 2),
    ):
        model.double().eval()
        for targets, words in zip((other, short), said, strict=True):
            batch = {"input_ids": ids, "labels": targets}
            with pytest.raises((UnsupportedError, ValueError), match=words):
                EmpiricalRisk(model, loss, [batch]).loss()
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(targets)
            assert abs(EmpiricalRisk(model, loss, [batch]).loss() - model(**batch).loss) < 1e-6


def trainer_of(
    model: nn.Module, heard: Any, folder: Path, rows: list[dict[str, Tensor]], **options: Any
) -> Any:
    """A `Trainer` whose forward passes something listens to."""
    pytest.importorskip("accelerate", reason='accelerate is absent: pip install -e ".[models]"')

    class Listening(transformers.Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with heard.listen(inputs):
                return super().compute_loss(model, inputs, *args, **kwargs)

    plain = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    how = {"max_steps": 1, "per_device_train_batch_size": 4} | {
        k: v for k, v in options.items() if k != "optimizers"
    }
    arguments = transformers.TrainingArguments(str(folder), **plain, **how)
    return Listening(
        model, arguments, train_dataset=rows, optimizers=options.get("optimizers", (None, None))
    )


def rows_of(b: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[n] for key, value in b.items()} for n in range(len(b["labels"]))]


def test_an_estimator_in_a_trainer_has_the_curvature_of_its_batch(tmp_path: Path) -> None:
    b = batch(4)
    trained = language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    estimator = CurvatureEstimator(
        risk_of(trained, [b]), KFAC, vectors=Exact(), decay=0.9, damping=1e-2
    )
    before = curvature(risk_of(language_model(), [b]), KFAC, vectors=Exact())
    trainer_of(trained, estimator, tmp_path, rows_of(b)).train()
    v = torch.randn(before.shape[1], dtype=torch.float64)
    torch.testing.assert_close(estimator.operator @ v, before @ v, rtol=1e-9, atol=1e-12)


def test_kfac_is_an_optimizer_of_a_trainer(tmp_path: Path) -> None:
    """One step equals that of a plain loop. The `Trainer` divides by the number of labels before
    they are shifted.
    """
    b = batch(4)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    plain, trained = language_model(**off), language_model(**off)
    mine, theirs = (
        KFACOptimizer(m, LOSS, 0.1, vectors=Exact(), mask=attended) for m in (plain, trained)
    )
    plain.train()
    with mine.listen(b):
        value = plain(**b, num_items_in_batch=int((b["labels"] >= 0).sum())).loss
    value.backward()
    mine.step()
    constant = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1.0)
    trainer_of(
        trained, theirs, tmp_path, rows_of(b), optimizers=(theirs, constant), max_grad_norm=0.0
    ).train()
    assert theirs.last_step is not None
    assert theirs.last_step.examples == 4
    order = torch.stack([p.detach().norm() for p in plain.parameters()])
    torch.testing.assert_close(
        torch.stack([p.detach().norm() for p in trained.parameters()]), order, rtol=1e-6, atol=0
    )
