"""What the site promises: every public name, every page, every example, and no name or message that
does not exist.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from test.test_public import NAMES

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "curvlinops_plus"


def text(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """What makes pages of the site; it is a file of docs/ and no module of the package."""
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference(hooks: ModuleType) -> None:
    shown = [
        name.removeprefix("curvlinops_plus.")
        for page in hooks.REFERENCE
        for name in hooks.full_names(page)
    ]
    assert len(shown) == len(set(shown))
    assert {name for name in shown if "." not in name} == set(NAMES) - {"__version__"}


def test_every_name_of_the_reference_exists(hooks: ModuleType) -> None:
    shown = [resolve(name) for page in hooks.REFERENCE for name in hooks.full_names(page)]
    classes = {thing.__name__: thing for thing in shown if isinstance(thing, type)}
    for name, members in hooks.MEMBERS.items():
        assert [member for member in members.split() if not hasattr(classes[name], member)] == [], (
            name
        )


def test_every_page_is_in_the_navigation(hooks: ModuleType) -> None:
    """Also checked by a strict build, which needs MkDocs."""
    named = set(
        re.findall(
            r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    )
    pages = {path.name for path in DOCS.glob("*.md")} | {
        "gallery.md",
        "reference/index.md",
        *(path.removesuffix(".ipynb") + ".md" for path in hooks.NOTEBOOKS),
        *hooks.TEXTS.values(),
    }
    pages |= {f"reference/{page}.md" for page in hooks.REFERENCE}
    assert named == pages


def test_every_example_has_a_card_and_a_page(hooks: ModuleType) -> None:
    gallery = hooks.gallery()
    for path in ROOT.glob("examples/*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name in hooks.docstring(path):  # says how it is started: no helper of others
            assert f"({hooks.site_path(name)})" in gallery, name
        assert path.read_text(encoding="utf-8") in hooks.example_page(name)


def test_cards_and_other_words_are_of_pages_that_exist(hooks: ModuleType) -> None:
    for page, image, _, _ in hooks.CARDS:
        assert (DOCS / f"{page}.md").is_file(), page
        assert (DOCS / f"{image}.png").is_file(), image
    assert [page for page in hooks.SYNONYMS if not (DOCS / page).is_file()] == []
    assert hooks._PLACE_OF_CARDS in (ROOT / "README.md").read_text(encoding="utf-8")


def test_alerts_become_admonitions(hooks: ModuleType) -> None:
    page = "Before.\n\n> [!WARNING]\n> **One.** Two\n> three.\n\n> a quotation\n"
    expected = "Before.\n\n!!! warning\n\n    **One.** Two\n    three.\n\n> a quotation\n"
    assert hooks.admonitions(page) == expected
    kinds = {"NOTE", "TIP", "WARNING", "IMPORTANT"}
    for path in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        used = re.findall(r"\[!(\w+)\]", path.read_text(encoding="utf-8"))
        assert set(used) <= kinds, path.name


def test_formulas_become_mathml(hooks: ModuleType) -> None:
    pytest.importorskip("latex2mathml")
    html = r'<p>Of <span class="arithmatex">\(a &lt; b\)</span>.</p>'
    drawn = hooks.on_page_content(html, None, None, None)
    assert "<math" in drawn
    assert "arithmatex" not in drawn
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in drawn


def test_a_line_in_italics_below_a_picture_is_its_caption(hooks: ModuleType) -> None:
    picture = '<p><img alt="A" src="a.png">\n<em>What it shows.</em></p>'
    figure = hooks.on_page_content(picture, None, None, None)
    assert figure.startswith("<figure><img")
    assert "<figcaption>What it shows.</figcaption></figure>" in figure
    alone = '<p><img alt="A" src="a.png"></p>'
    assert hooks.on_page_content(alone, None, None, None) == alone


def test_pictures_come_from_the_site(hooks: ModuleType) -> None:
    """Nothing is loaded from other hosts."""
    for path in [*DOCS.glob("*.md"), *(ROOT / name for name in hooks.TEXTS)]:
        assert re.findall(r"!\[[^]]*\]\(\w+:", path.read_text(encoding="utf-8")) == [], path.name
    assert "url(" not in (DOCS / "site.css").read_text(encoding="utf-8")


def test_links_lead_to_files(hooks: ModuleType) -> None:
    """Relative links, as they are read in the repository; the build checks them and their anchors
    on the site.
    """
    for path in [*DOCS.glob("*.md"), *(ROOT / name for name in hooks.TEXTS)]:
        prose = re.sub(
            r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        for target in re.findall(r"\]\((?!\w+:)([^)\s#]+)(?:#[^)\s]*)?\)", prose):
            made = target.startswith("reference/") or target == "gallery.md"
            assert made or (path.parent / target).exists(), f"{path.name}: {target}"


# ------------------------------------------------------------------------------- names and messages


def resolve(name: str) -> object:
    """What `subpackage.file.Name.method` is, or None."""
    parts, thing = name.removeprefix("curvlinops_plus.").split("."), None
    for k in range(len(parts), -1, -1):
        try:
            thing = importlib.import_module(".".join(["curvlinops_plus", *parts[:k]]))
        except ImportError:
            continue
        for part in parts[k:]:
            thing = getattr(thing, part, None)
        return thing
    return None


def test_names_of_how_it_works_exist() -> None:
    subpackages = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    named = set(re.findall(rf"`((?:{subpackages})\.[\w.]+)`", text("how_it_works")))
    assert len(named) > 30
    assert sorted(name for name in named if resolve(name) is None) == []
    assert resolve("risk.record.swoop") is None


def templates() -> list[str]:
    """Every string of the package, with `\\0` for what is filled in."""

    def joined(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(joined, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return joined(node.left) + joined(node.right)
        return (
            node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"
        )

    kinds = (ast.JoinedStr, ast.Constant, ast.BinOp)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    return [joined(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


def test_quoted_messages_are_those_of_the_package() -> None:
    quoted = re.findall(
        r"^```error\n(.*?)\n```$", text("troubleshooting"), flags=re.DOTALL | re.MULTILINE
    )
    assert len(quoted) > 25
    everything = templates()
    for message in quoted:
        pattern = re.compile(
            ".*".join(re.escape(part.strip()) for part in message.split("…")), flags=re.DOTALL
        )
        assert any(pattern.search(template) for template in everything), message
