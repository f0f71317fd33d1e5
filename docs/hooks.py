"""Hooks of MkDocs: the pages of the site that are made from other files of the repository.

README is the start page, CONTRIBUTING and CHANGELOG are pages, every file of examples/ is a page with its picture, the
gallery has a card for each example, and the reference has a page for each room of the package. Links are written as
they are right in the repository, and are translated here.
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
TEXTS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/*.py"))

#: Classes that are shown with what they inherit; others refer to these.
WITH_INHERITED = ("LinearOperator", "KFACOptimizer", "KFACPreconditioner")


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
    """A page whose relative links point to pages of the site; MkDocs complains about a link to no file."""
    here = posixpath.dirname(repository_path(uri))

    def link(found: re.Match[str]) -> str:
        target, fragment = found[1], found[2] or ""
        path = posixpath.normpath(posixpath.join(here, target))
        page = site_path(path) if (ROOT / path).is_file() else None
        return found[0] if page is None else f"]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{fragment})"

    return re.sub(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)", link, markdown)


# ------------------------------------------------------------------------------------------------------------ examples


def docstring(path: Path) -> str:
    """That of a module."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def picture(path: str) -> str | None:
    """The picture in docs/ that an example draws: the first that it names."""
    names = re.findall(r"\w+\.png", (ROOT / path).read_text(encoding="utf-8"))
    return next((name for name in names if (ROOT / "docs" / name).is_file()), None)


def example_page(path: str) -> str:
    """What an example says, draws and is."""
    title, _, text = docstring(ROOT / path).partition("\n")
    image, up = picture(path), "../" * path.count("/")
    shown = f"\n![What {path} draws]({up}{image})\n" if image else ""
    source = (ROOT / path).read_text(encoding="utf-8")
    return f"# {Path(path).name}\n\n**{title}**\n{text}\n{shown}\n````{{.python title={path}}}\n{source}````\n"


def gallery() -> str:
    """A card for each script of examples/ that says how it is started."""
    cards = []
    for path in EXAMPLES:
        text = docstring(ROOT / path)
        if path.count("/") > 1 or path not in text:
            continue
        page, image, question = site_path(path), picture(path), text.split("\n\n")[0].replace("\n", " ")
        thumbnail = f"[![What {path} draws]({image}){{loading=lazy}}]({page})\n\n    " if image else ""
        cards.append(f"-   {thumbnail}**[{Path(path).name}]({page})**\n\n    {question}\n")
    intro = "Every script runs by itself, prints its figures and draws its picture; a card leads to its source.\n"
    return f'# Gallery\n\n{intro}\n<div class="grid cards" markdown>\n\n' + "\n".join(cards) + "\n</div>\n"


# ----------------------------------------------------------------------------------------------------------- reference


def exported(path: Path) -> list[str]:
    """What `__all__` of a module lists."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def imported_at_the_top() -> set[str]:
    """The public names: what `curvlinops_plus/__init__.pyi` imports."""
    body = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8")).body
    return {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def rooms() -> dict[str, list[str]]:
    """Each room with the full names that it exports, the public ones first and as they are imported from the top."""
    top, found = imported_at_the_top(), {}
    files = [*PACKAGE.glob("*/__init__.py"), *(p for p in PACKAGE.glob("*.py") if p.name != "__init__.py")]
    for path in sorted(files):
        room = path.parent.name if path.name == "__init__.py" else path.stem
        names = exported(path)
        public = [f"curvlinops_plus.{name}" for name in names if name in top]
        if public or (names and path.parent != PACKAGE):
            found[room] = public + [f"curvlinops_plus.{room}.{name}" for name in names if name not in top]
    return found


def about(room: str) -> str:
    """The docstring of a room, without its floor."""
    path = PACKAGE / room / "__init__.py"
    text = docstring(path if path.exists() else PACKAGE / f"{room}.py")
    text = re.sub(r"^Floor \d: ", "", text)
    return text[0].upper() + text[1:]


def reference_page(room: str, names: list[str]) -> str:
    """Docstrings of all names of a room."""
    entries = []
    for name in names:
        options = "\n    options:\n      inherited_members: true" if name.split(".")[-1] in WITH_INHERITED else ""
        entries.append(f"::: {name}{options}\n")
    return f"# {room}\n\n{about(room)}\n\n" + "\n".join(entries)


def reference_index() -> str:
    """All names with the first sentences of their docstrings."""
    import griffe

    package = griffe.load("curvlinops_plus", search_paths=[str(ROOT)])
    lines = ["# All names\n", "Public names are imported from `curvlinops_plus`, the others from their rooms.\n"]
    for room, names in rooms().items():
        lines += [f"\n## [{room}]({room}.md)\n", about(room).split("\n\n")[0], "\n| name | |", "| --- | --- |"]
        for name in names:
            short = name.removeprefix("curvlinops_plus.")
            doc = package[short].docstring
            sentence = re.split(r"(?<=\.)\s|\n\n", doc.value)[0] if doc else ""
            sentence = " ".join(sentence.split()).replace("|", r"\|")
            lines.append(f"| [`{short}`][{name}] | {sentence} |")
    return "\n".join([*lines, "\n::: curvlinops_plus.__version__\n"])


# --------------------------------------------------------------------------------------------------------------- MkDocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    for path, uri in TEXTS.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    made = {"gallery.md": gallery(), "reference/index.md": reference_index()}
    made |= {f"reference/{room}.md": reference_page(room, names) for room, names in rooms().items()}
    made |= {path.removesuffix(".py") + ".md": example_page(path) for path in EXAMPLES}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translates links, except in pages that are made here."""
    uri = page.file.src_uri
    made = uri.startswith(("reference/", "examples/")) or uri == "gallery.md"
    return markdown if made else translated(markdown, uri)
