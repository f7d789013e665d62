"""Check that the documentation holds together and is of today's code, and print each problem. `make check` runs it.

- every page is in the table of contents once, and links lead to files and headings that exist;
- every public name is in the reference, and the signatures that are written out there are the functions' own;
- files, classes, commands and extras that the pages name exist;
- pictures and written tables show what the code says (`make pictures` writes them anew).
"""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fullshard
import fullshard.compat
import fullshard.wrap

ROOT = Path(__file__).parents[1]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "fullshard"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^(```+)(.*?)$(.*?)^\1$", re.MULTILINE | re.DOTALL)  # fence, what it is, its text


def name_of(page: Path) -> str:
    """Return the path of a page below the root."""
    return page.relative_to(ROOT).as_posix()


def listed(page: Path) -> Iterator[Path]:
    """Yield the pages in the tables of contents of `page`, and in theirs."""
    for _, kind, text in FENCED.findall(page.read_text()):
        if kind == "{toctree}":
            for line in text.splitlines():
                if line and not line.startswith(":"):
                    below = page.parent / f"{line}.md"
                    yield below
                    yield from listed(below)


def anchors(page: Path) -> set[str]:
    """Return what a link may name behind `#`: headings in lower case, spaces as dashes, other marks left out."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> Iterator[str]:
    """Yield where links and pictures of `page` lead to, without other sites."""
    text = page.read_text()
    found = [text.strip() for text in re.findall(r"^```\{image\} (.+)$", text, re.MULTILINE)]
    prose = re.sub(r"`[^`\n]+`", "code", FENCED.sub("", text))  # a link's own text may be code
    found += re.findall(r"\]\(([^)\s]+)\)", prose)
    yield from (target for target in found if "://" not in target)


def contents_and_links() -> Iterator[str]:
    """Yield pages that no table of contents lists, or that several list, and links that lead nowhere."""
    found = [DOCS / "index.md", *listed(DOCS / "index.md")]
    for page in sorted({*found, *DOCS.rglob("*.md")}):
        if found.count(page) != 1:
            yield f"{name_of(page)}: in {found.count(page)} tables of contents"
    for page in PAGES:
        for target in targets(page):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                yield f"{name_of(page)}: the link to {target} leads nowhere"


def reference() -> Iterator[str]:
    """Yield public names without an entry in docs/api, and signatures there that are others than those of the functions."""
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    entries = {
        line.split(":: ")[1].partition("(")[0].split(".")[-1]
        for line in pages.splitlines()
        if line.startswith((".. auto", ".. py:"))
    }
    for module in (fullshard, fullshard.wrap):
        yield from (f"docs/api: no entry of {module.__name__}.{name}" for name in sorted({*module.__all__} - entries))
    compat = (DOCS / "api" / "compat.md").read_text()
    yield from (f"docs/api/compat.md: no {name}" for name in fullshard.compat.__all__ if not re.search(rf"\b{name}\b", compat))
    # They are written out, since Sphinx shows the overloads that type checkers need.
    for function in (fullshard.fully_shard, fullshard.save_weights):
        written = re.search(rf"autofunction:: fullshard\.{function.__name__}\((.*)\)", pages)
        names = re.sub(r"\([^()]*\)", "", written[1] if written else "").split(",")
        parameters = [name for part in names if (name := part.split("=")[0].strip()) != "*"]
        if parameters != list(inspect.signature(function).parameters):
            yield f"docs/api: {function.__name__} has other parameters than {parameters}"


def names_of_the_design() -> Iterator[str]:
    """Yield files and classes that the pages of the design name and that do not exist."""
    packages = "|".join(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    files = {path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")}
    for page in (DOCS / f"{name}.md" for name in ("architecture", "data-plane", "schedule", "error-detection")):
        text, where = FENCED.sub("", page.read_text()), name_of(page)
        for package, file in re.findall(rf"`({packages})/(\w+)(?:\.py)?`", text):
            if not (SOURCE / package / f"{file}.py").exists():
                yield f"{where}: no file {package}/{file}.py"
        for package, file, name in re.findall(rf"`({packages})\.(\w+)\.(\w+)`", text):
            path = SOURCE / package / f"{file}.py"
            if not path.exists() or not re.search(rf"^(class|def) {name}\b", path.read_text(), re.MULTILINE):
                yield f"{where}: no {package}.{file}.{name}"
        for name, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
            if not re.search(rf"^class {name}\b", code, re.MULTILINE) or not re.search(rf"\b{attribute}\b", code):
                yield f"{where}: no {name}.{attribute}"
        for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text):
            if name not in files:
                yield f"{where}: no file {name}"


def commands_and_extras() -> Iterator[str]:
    """Yield targets of make, and extras of the package, that the pages name and that do not exist."""
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(block for _, _, block in FENCED.findall(text))
        for command in [*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE)]:
            if not re.search(rf"^{command}:", makefile, re.MULTILINE):
                yield f"{name_of(page)}: no target of make {command}"
    for extras in re.findall(r"^\| (`[a-z]+`(?:, `[a-z]+`)*) \|", (DOCS / "install.md").read_text(), re.MULTILINE):
        for extra in re.findall(r"`([a-z]+)`", extras):
            if not re.search(rf"^{extra} = \[", project, re.MULTILINE):
                yield f"docs/install.md: no extra {extra}"


def script(path: Path) -> ModuleType:
    """Import a script as a module. That of the pictures needs matplotlib only to draw."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn() -> Iterator[str]:
    """Yield pictures and written tables that are not of today's code."""
    for name, compute in script(DOCS / "pictures" / "draw.py").DRAWN.items():
        path = DOCS / "pictures" / f"{name}.svg"
        found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)
        if found is None or json.loads(html.unescape(found[1])) != json.loads(json.dumps(compute())):
            yield f"{name_of(path)}: not of today's code; draw it with `make pictures`"
    levels, proofs = (script(ROOT / "scripts" / f"{name}.py") for name in ("levels", "proofs"))
    if not set(levels.rows(levels.SIZES[:1])) <= set(levels.PAGE.read_text().splitlines()):  # the larger model takes longer
        yield f"{name_of(levels.PAGE)}: not of today's code; write it with `make pictures`"
    if proofs.PAGE.read_text() != proofs.page():
        yield f"{name_of(proofs.PAGE)}: not of today's tests; write it with `make pictures`"


def main() -> int:
    """Print all problems. Return the exit status, 1 if there are any."""
    checks = (contents_and_links, reference, names_of_the_design, commands_and_extras, drawn)
    found = [line for check in checks for line in check()]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
