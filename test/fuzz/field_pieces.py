"""Pieces like those in which faults were found in the field. Importing this file registers them."""

from __future__ import annotations

from random import Random

from test.fuzz import field_modules as field
from test.fuzz.pieces import ANY, PIECES, TOKENS, Options, Piece, Shape


def _draw_experts(r: Random, shape: Shape) -> Options:
    return {
        "how": r.choice([*field.ROUTES]),
        "top": r.randint(1, 2),
        "stacked": r.random() < 0.4,
        "bias": r.random() < 0.6,
    }


def _draw_read_linear(r: Random, shape: Shape) -> Options:
    how = r.choice(["linear", "matmul", "addmm", "in, out", "checkpoint"])
    return {"o": r.randint(1, 3), "how": how, "bias": r.random() < 0.7}


def _draw_kept(r: Random, shape: Shape) -> Options:
    return {"where": r.choice(["attribute", "dict", "list", "object"])}


FIELD_PIECES: dict[str, Piece] = {
    "experts": Piece(ANY, _draw_experts, lambda s, o: field.experts(s[-1], **o), 2),
    "own function": Piece(
        ANY,
        lambda r, s: {"name": r.choice([*field.OWN])},
        lambda s, o: field.own_function(**o),
        0.8,
    ),
    "own function of a parameter": Piece(
        ANY,
        lambda r, s: {"name": r.choice([*field.OWN_OF_PARAMETERS]), "held": r.random() < 0.5},
        lambda s, o: field.own_function_of(d=s[-1], **o),
    ),
    "read linear": Piece(ANY, _draw_read_linear, lambda s, o: field.read_linear(s[-1], **o), 1.5),
    "matrix": Piece(
        ANY,
        lambda r, s: {"o": r.randint(2, 3), "how": r.choice([*field.MATRICES])},
        lambda s, o: field.matrix(s[-1], **o),
        1.5,
    ),
    "table": Piece(
        (2,),
        lambda r, s: {"how": r.choice([*field.TABLES])},
        lambda s, o: field.table(*s, **o),
        2.5,
    ),
    "kept": Piece(ANY, _draw_kept, lambda s, o: field.kept(s[-1], **o)),
    "in two places": Piece(
        ANY,
        lambda r, s: {"bias": r.random() < 0.6},
        lambda s, o: field.in_two_places(s[-1], **o),
        0.7,
    ),
    "subclass": Piece(
        ANY,
        lambda r, s: {"how": r.choice([*field.SUBCLASSES])},
        lambda s, o: field.SUBCLASSES[o["how"]](s[-1]),
    ),
    "own parametrization": Piece(
        ANY,
        lambda r, s: {"how": r.choice(["weight", "bias", "low rank"])},
        lambda s, o: field.parametrized(s[-1], **o),
        0.8,
    ),
}

FIELD_TOKENS: dict[str, Piece] = {
    "looked up": Piece(
        (1,),
        lambda r, s: {"d": r.randint(2, 3), "how": r.choice([*field.LOOKUPS])},
        lambda s, o: field.looked_up(**o),
        2,
    ),
    "bag with offsets": Piece(
        (1,),
        lambda r, s: {
            "d": r.randint(2, 3),
            "mode": r.choice(["sum", "mean", "max"]),
            "weights": r.random() < 0.4,
        },
        lambda s, o: field.bag_with_offsets(**o),
    ),
    "padded": Piece(
        (1,),
        lambda r, s: {
            "d": 2,
            "pooled": r.random() < 0.5,
            "padding": r.choice([None, 0]),
        },
        lambda s, o: field.padded(**o),
        1.5,
    ),
}

PIECES |= FIELD_PIECES
TOKENS |= FIELD_TOKENS
