"""Hooks of MkDocs: the pages of the site that are made from other files of the repository.

README is the start page, CONTRIBUTING and CHANGELOG are pages, every file of examples/ is a page
with its picture, the gallery has a card for each example, and the reference has a page for each
task. Links are written as they are right in the repository, and are translated here.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "curvlinops_plus"
#: File of the repository -> page of the site.
TEXTS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
EXAMPLES = sorted(
    path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/*.py")
)


def site_path(path: str) -> str | None:
    """The page or picture of the site that shows a file of the repository."""
    if path in EXAMPLES:
        return path.removesuffix(".py") + ".md"
    inside = posixpath.relpath(path, "docs")
    return TEXTS.get(path) if inside.startswith("../") else inside


def repository_path(uri: str) -> str:
    """The file that a page of the site shows: the other way."""
    texts = {page: path for path, page in TEXTS.items()}
    example = uri.removesuffix(".md") + ".py"
    return texts.get(uri) or (example if example in EXAMPLES else f"docs/{uri}")


def translated(markdown: str, uri: str) -> str:
    """A page whose relative links point to pages of the site; MkDocs complains about a link to no
    file.
    """
    here = posixpath.dirname(repository_path(uri))

    def link(found: re.Match[str]) -> str:
        target, fragment = found[1], found[2] or ""
        path = posixpath.normpath(posixpath.join(here, target))
        page = site_path(path) if (ROOT / path).is_file() else None
        return (
            found[0]
            if page is None
            else f"]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{fragment})"
        )

    return re.sub(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)", link, markdown)


# ----------------------------------------------------------------------------------------- examples


def docstring(path: Path) -> str:
    """That of a module."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def titled(text: str) -> tuple[str, str]:
    """Its first sentence, or what stands before a colon, and the rest."""
    title, rest = re.split(r"(?<=[.?:])\s+", f"{text} ", maxsplit=1)
    return title.rstrip(".:"), rest[:1].upper() + rest[1:]


def picture(path: str) -> str | None:
    """The picture in docs/ that an example draws: the first that it writes."""
    found = re.search(
        r'^write\(\w+, "(\w+)"\)',
        (ROOT / path).read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    return f"{found[1]}.png" if found else None


def example_page(path: str) -> str:
    """What an example says, draws and is."""
    title, text = titled(docstring(ROOT / path))
    image, up = picture(path), "../" * path.count("/")
    shown = f"\n![What {path} draws]({up}{image})\n" if image else ""
    source = (ROOT / path).read_text(encoding="utf-8")
    wide = "---\nhide: [navigation, toc]\n---\n"
    return f"{wide}# {title}\n\n{text}\n{shown}\n````{{.python title={path}}}\n{source}````\n"


def gallery() -> str:
    """A card for each script of examples/ that draws a picture and says how it is started, and a
    list of the others.
    """
    cards, others = [], []
    for path in EXAMPLES:
        text = docstring(ROOT / path)
        if path.count("/") > 1 or path not in text:
            continue
        title, rest = titled(text.split("\n\n")[0].replace("\n", " "))
        link, image = f"[{title}]({site_path(path)})", picture(path)
        said = f"{rest.strip()} `{Path(path).name}`".strip()
        if image:
            thumbnail = (
                f"[![What {path} draws]({image}){{loading=lazy}}]({site_path(path)})"
            )
            cards.append(f"-   {thumbnail}\n\n    **{link}**\n\n    {said}\n")
        else:
            stop = "" if title.endswith("?") else "."
            others.append(f"* **{link}**{stop} {said}")
    intro = "Every script runs by itself and prints its figures; a card leads to its source.\n"
    shown = '\n<div class="grid cards" markdown>\n\n' + "\n".join(cards) + "\n</div>\n"
    return (
        f"# Gallery\n\n{intro}{shown}\n## Without a picture\n\n"
        + "\n".join(others)
        + "\n"
    )


# ---------------------------------------------------------------------------------------- reference

#: Pages of the reference, by task: title, what it is about, names. Without a dot they are imported
#: from the top.
REFERENCE: dict[str, tuple[str, str, str]] = {
    "risk": (
        "Model, loss and data",
        "What is minimised, and which vectors are backpropagated. [Losses](../losses.md), "
        "[modes](../modes.md)",
        "EmpiricalRisk Exact MonteCarlo CurvaturePropagation Empirical ForwardOnly "
        "split_complex",
    ),
    "curvature": (
        "Block-diagonal curvature",
        "One call, one block for each layer. [Which approximation, when?](../choosing.md)",
        "curvature KFAC EKFAC DiagonalBlock FullBlock TNT NearestKronecker ScaledIdentity "
        "BlockwiseLinearOperator blocks.Summary Memory blocks.Verification save load",
    ),
    "exact": (
        "Exact operators",
        "Matrix-free: products with the model. [Examples](../exact.md)",
        "GGN Hessian Jacobian GGNFactor ActivationHessian",
    ),
    "linalg": (
        "Linear algebra",
        "What all operators can do, dampings and solvers.",
        "LinearOperator RelativeDamping HeuristicDamping IdentityLinearOperator "
        "SubmatrixLinearOperator submatrix ProjectedLinearOperator CGInverseLinearOperator "
        "MINRESInverseLinearOperator LSMRInverseLinearOperator NeumannInverseLinearOperator "
        "SolveInfo cg minres lsmr neumann from_scipy",
    ),
    "estimate": (
        "Estimators",
        "Numbers of a matrix from its products. [Which one](../estimate.md)",
        "hutchinson_trace hutchpp_trace xtrace hutchinson_diag xdiag hutchinson_squared_fro "
        "logdet top_eigenpairs spectral_norm condition_number lanczos_approximate_spectrum "
        "lanczos_approximate_log_spectrum LanczosApproximateSpectrumCached "
        "LanczosApproximateLogSpectrumCached approximate_boundaries approximate_boundaries_abs "
        "random_vector",
    ),
    "applications": (
        "Applications",
        "Functions and small classes made of a risk and an operator.",
        "Laplace applications.Normal attribution_scores self_influence per_example_gradients "
        "linear_datamodeling_score applications.DatamodelingScore prune merge QuadraticPenalty",
    ),
    "plots": (
        "Pictures",
        "Results drawn with Matplotlib. [How to look at a curvature](../guide.md#look-at-it)",
        "plot_summary plot_spectrum plot_predictions plot_influence",
    ),
    "training": (
        "Training",
        "[K-FAC](../optimizer.md), [curvature in your own loop](../streaming.md), "
        "[stochastic reconfiguration](../reconfiguration.md).",
        "KFACOptimizer KFACPreconditioner LevenbergMarquardt NormConstraint WeightDecay "
        "StepReport CurvatureEstimator StochasticReconfiguration stochastic_reconfiguration "
        "fisher_inverse CenteredFisherLinearOperator SolveReport",
    ),
    "processes": (
        "Several processes",
        "[How to use them](../processes.md)",
        "Processes Checkpoint",
    ),
    "classic": (
        "Classes of curvlinops",
        "Names, arguments and defaults of curvlinops 3.0.1. [What differs](../from_curvlinops.md)",
        "KFACLinearOperator EKFACLinearOperator KFOCLinearOperator KFACInverseLinearOperator "
        "GGNLinearOperator HessianLinearOperator EFLinearOperator FisherMCLinearOperator "
        "GGNDiagonalLinearOperator JacobianLinearOperator TransposedJacobianLinearOperator "
        "GGNFactorLinearOperator ActivationHessianLinearOperator FisherType KFACType "
        "compute_eigenvalue_correction_linear_weight_sharing",
    ),
    "errors": (
        "Errors and warnings",
        "[What messages mean](../troubleshooting.md)",
        "UnsupportedError NumericsError SingularMatrixError VerificationError NoClosedForm "
        "ProcessError CurvatureWarning",
    ),
    "extending": (
        "Extension points",
        "Layers, losses, approximations, vectors and matrices of your own. "
        "[Recipes](../extending.md)",
        "register_rule check_rule AffineRule LayerRule SparseRows register_likelihood "
        "FromDistribution Likelihood Accumulator blocks.Approximation Needs risk.LayerBatch "
        "risk.Vectors as_vectors linalg.Dense linalg.Diagonal linalg.Kronecker "
        "linalg.Eigendecomposed linalg.BlockDiagonal linalg.Sum linalg.Product linalg.Scaled "
        "linalg.Structure linalg.Space linalg.Layout",
    ),
}
_OPERATOR = (
    "shape inverse power shift trace logdet det frobenius_norm eigenvalues diagonal sample "
    "quadratic_form to to_dense to_scipy materialize adjoint T H"
)
_OPTIMIZER = "step listen paused warmup state_dict load_state_dict close"
#: What users call of classes that have more; others show all of their own.
MEMBERS = {
    "LinearOperator": _OPERATOR,
    "BlockwiseLinearOperator": (
        "blocks summary mapping operator compute inverse memory offload split merge verify state_dict "
        "load_state_dict from_state_dict"
    ),
    "CurvatureEstimator": "update listen refresh inverse operator uncalled merge reset state_dict load_state_dict",
    "KFACOptimizer": _OPTIMIZER,
    "KFACPreconditioner": _OPTIMIZER,
    "StochasticReconfiguration": "step state_dict load_state_dict",
    "EmpiricalRisk": "loss gradient gradient_and_loss with_data at assign",
    "Processes": "rank world share",
    "Accumulator": "affine sweeps update finish add value using needs changes_basis change_basis",
    "AffineRule": "patterns inputs grads sizes sparse input_gram mean_inputs grad_gram "
    "refuses",
    "LayerRule": "patterns per_example_grads axes refuses",
    "SparseRows": "to_dense",
    "Likelihood": "nll grad hessian_product hessian_root hessian_root_columns draw",
    "LayerBatch": "per_example_grads squared_grads inputs grads input_gram grad_gram examples pieces",
    "Vectors": "count send root",
}


def full_names(page: str) -> list[str]:
    """Full names of a page of the reference."""
    return [f"curvlinops_plus.{name}" for name in REFERENCE[page][2].split()]


def reference_page(page: str) -> str:
    """Signatures and docstrings of all names of a page."""
    title, about, _ = REFERENCE[page]
    entries = []
    for name in full_names(page):
        members = MEMBERS.get(name.split(".")[-1], "").split()
        listed = "".join(f"\n        - {member}" for member in members)
        options = (
            f"\n    options:\n      inherited_members: true\n      members:{listed}"
            if members
            else ""
        )
        entries.append(f"::: {name}{options}\n")
    return f"# {title}\n\n{about}\n\n" + "\n".join(entries)


def reference_index() -> str:
    """All names with the first sentences of their docstrings."""
    import griffe

    package = griffe.load("curvlinops_plus", search_paths=[str(ROOT)])
    lines = [
        "# Reference\n",
        "Names without a dot are imported from `curvlinops_plus`, others from its subpackages.",
    ]
    for page, (title, _, _) in REFERENCE.items():
        lines += [f"\n## [{title}]({page}.md)\n\n| | |", "| --- | --- |"]
        for name in full_names(page):
            short = name.removeprefix("curvlinops_plus.")
            doc = package[short].docstring
            sentence = re.split(r"(?<=\.)\s|\n\n", doc.value)[0] if doc else ""
            sentence = " ".join(sentence.split()).replace("|", r"\|")
            lines.append(f"| [`{short}`][{name}] | {sentence} |")
    return "\n".join([*lines, "\n::: curvlinops_plus.__version__\n"])


# ------------------------------------------------------------------------------------------- MkDocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    for path, uri in TEXTS.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    made = {"gallery.md": gallery(), "reference/index.md": reference_index()}
    made |= {f"reference/{page}.md": reference_page(page) for page in REFERENCE}
    made |= {path.removesuffix(".py") + ".md": example_page(path) for path in EXAMPLES}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Translates links, except in pages that are made here."""
    uri = page.file.src_uri
    made = uri.startswith(("reference/", "examples/")) or uri == "gallery.md"
    return markdown if made else translated(markdown, uri)
