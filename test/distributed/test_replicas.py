"""Everything but the data is the same in all processes, or they say what differs."""

from __future__ import annotations

import re
from typing import Any

WHERE = r".* in process 0, and .* in process 1\. Everything but the data has to be the same in all\."
MODEL = "^ProcessError: The processes differ in model and loss, or what they compute with these: "
OWNED = "^ProcessError: The processes differ in what they multiply: "
MADE = r"what the matrix was made with, as dampings and multiples is "
VECTOR = f"the vector is{WHERE} Each process has to multiply the same vectors"
RIGHT = r"^\d\.\d+e[+-]\d+$"


def require(found: list[dict[str, str]], words: dict[str, str]) -> None:
    assert found[0] == found[1]  # all are told the same
    assert found[0].keys() == words.keys()
    for name, pattern in words.items():
        assert re.search(pattern, found[0][name], re.DOTALL), (name, found[0][name])


def test_other_models(workers: Any) -> None:
    """Also where they differ in nothing that parameters among `params` and their norms tell."""
    parts = {
        "statistics": rf"the buffer '1.running_mean' is{WHERE} Buffers that .* for b in model.buffers\(\)",
        "other numbers beside infinities": f"the buffer '3.far' is{WHERE}",
        "rows": f"the parameter '0.weight' is{WHERE}",
        "signs": f"the parameter '0.weight' is{WHERE}",
        "rest": f"the parameter 'model.5.weight' is{WHERE}",
        "eps": "the module '1' is 'BatchNorm1d.*eps=1e-05.*eps=0.5",
        "heads": f"'num_heads' of the module '4' is 2{WHERE}",
        "mode": f"the module '2' is 'eval'{WHERE}",
        "smoothing": f"the loss, 'label_smoothing' of the loss is 0.0{WHERE}",
        "weights": f"the loss, the buffer 'weight' is{WHERE}",
        "partial": f"the loss, weight is{WHERE}",
        "closure": f"the loss is False{WHERE}",
        "count": f"num_data= is 10{WHERE}",
    }
    noted = {"what a pass notes": RIGHT, "what a pass has noted": RIGHT}
    words = {"same": RIGHT, **noted, **{name: MODEL + part for name, part in parts.items()}, "afterwards": RIGHT}
    found = workers.run(2, "differing")
    require(found, words)
    assert found[0]["same"] == found[0]["afterwards"]


def test_other_vectors(workers: Any) -> None:
    """Of operators whose products are sums over processes; what each has by itself may be multiplied with anything."""
    names = "GGN,one entry,order,from the left,adjoint,form,tree,Hessian,estimated,eigenvalues,solved"
    words = {
        **dict.fromkeys(names.split(","), MODEL + VECTOR),
        "Fisher": f"{MODEL}vectors=, seed is 0{WHERE}",
        "seed": f"{MODEL}vectors=, seed is 0{WHERE}",
        "approximation": f"{MODEL}approximation= is .*KFAC.*EKFAC",
        "damping": f"^ProcessError: The processes differ in the inverse that they make: {MADE}1.0{WHERE}",
        "heuristic": f"^ProcessError: The processes differ in the inverse that they make: {MADE}1.0{WHERE}",
        "power": f"^ProcessError: The processes differ in the power that they make: {MADE}0.5{WHERE}",
        "shift": f"{OWNED}{MADE}1.0{WHERE}",
        "multiple": f"{OWNED}{MADE}",
        "added": f"{OWNED}{MADE}",
        "refresh": f"^ProcessError: The processes differ in a refresh: the damping is 1.0{WHERE}",
        "replicated": "True",
        "generator": "True",
    }
    require(workers.run(2, "other_vectors"), words)


def test_calls_that_are_left_early(workers: Any) -> None:
    """Nobody is taken to be in the call before."""
    failed = "^ProcessError: Process 1 of 2 failed in {}, and all have stopped there, unchanged. {}"
    words = {
        "blocks": failed.format("BlockwiseLinearOperator", "ValueError: 'nothing' is no approximation"),
        "estimator": failed.format("CurvatureEstimator", "ValueError: decay=7"),
        "GGN": failed.format("GGN", "ValueError: Unknown vectors: 'nothing'"),
        "Hessian": failed.format("Hessian", "ValueError: chunk_size=0"),
        "interrupted": r"^ProcessError: The processes are in different places: .*collective calls number \[\d+, \d+\]",
    }
    for name in [*words]:
        words[f"after {name}"] = "True"
    require(workers.run(2, "left_early"), words)


def test_batch_norm_after_training(workers: Any) -> None:
    """Its statistics differ; while it trains they are not read."""
    words = {
        "while training": RIGHT,
        "afterwards": f"{MODEL}the buffer '1.running_mean' is{WHERE} Buffers that",
        "after sending them": RIGHT,
    }
    require(workers.run(2, "trained_statistics"), words)
