"""How the examples draw: pictures that can be read when they are 400 pixels wide, with colours for
everybody.

from style import COLORS, legend, panel, write   # in an example
"""

from pathlib import Path

from matplotlib.figure import Figure

#: Okabe and Ito's palette without its yellow: colour-blind readers tell them apart.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
#: Drawn beside colours: lines can also be told apart without them.
DASHES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "-"]
_FONT, _WIDTH, _HEIGHT = 13, 5.2, 3.4  # points and inches: half of it is still 9 points on a screen


def panel(height=_HEIGHT):
    """Axes in a figure of their own."""
    ax = Figure(figsize=(_WIDTH, height), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.tick_params(labelsize=_FONT - 2)
    ax.xaxis.label.set_size(_FONT)
    ax.yaxis.label.set_size(_FONT)
    ax.title.set_size(_FONT)
    ax.set_prop_cycle(color=COLORS, linestyle=DASHES)
    return ax


def legend(ax, columns=2, **options):
    """A legend above the axes, where it hides no curve."""
    place = {
        "loc": "lower center",
        "bbox_to_anchor": (0.5, 1.0),
        "frameon": False,
        "fontsize": _FONT - 2,
    }
    ax.legend(ncols=columns, **{**place, **options})


def write(ax, name):
    """Write docs/`name`.png, which pages show."""
    ax.figure.savefig(Path(__file__).parents[1] / "docs" / f"{name}.png", dpi=160)
