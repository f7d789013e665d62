"""The documentation holds together: pages are listed, links lead somewhere, public names are in the reference. `make docs` builds it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullshard
import fullshard.compat
import fullshard.wrap

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
FENCED = re.compile(r"^(```+)(.*?)$(.*?)^\1$", re.MULTILINE | re.DOTALL)  # fence, what it is, its text


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def listed(page: Path) -> Iterator[Path]:
    """The pages in the tables of contents of `page`, and in theirs."""
    for _, kind, text in FENCED.findall(page.read_text()):
        if kind == "{toctree}":
            for line in text.splitlines():
                if line and not line.startswith(":"):
                    below = page.parent / f"{line}.md"
                    yield below
                    yield from listed(below)


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: headings in lower case, spaces as dashes, other marks left out."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> Iterator[str]:
    """Where links and pictures of `page` lead to, without other sites."""
    text = page.read_text()
    found = [text.strip() for text in re.findall(r"^```\{image\} (.+)$", text, re.MULTILINE)]
    prose = re.sub(r"`[^`\n]+`", "code", FENCED.sub("", text))  # a link's own text may be code
    found += re.findall(r"\]\(([^)\s]+)\)", prose)
    yield from (target for target in found if "://" not in target)


def test_every_page_is_in_the_table_of_contents_once() -> None:
    found = list(listed(DOCS / "index.md"))
    assert sorted([DOCS / "index.md", *found]) == PAGES


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in targets(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)}: {target}"


@pytest.mark.parametrize("module", [fullshard, fullshard.wrap], ids=lambda module: module.__name__)
def test_every_public_name_has_an_entry_in_the_reference(module: object) -> None:
    entries = {
        line.split(":: ")[1].partition("(")[0].split(".")[-1] for line in REFERENCE.splitlines() if line.startswith(".. auto")
    }
    assert set(module.__all__) <= entries  # type: ignore[attr-defined]


def test_every_name_of_fsdp1s_surface_is_in_the_reference() -> None:
    page = (DOCS / "api" / "compat.md").read_text()
    assert [name for name in fullshard.compat.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_the_signature_of_fully_shard_in_the_reference_is_its_own() -> None:
    """It is written out there, since Sphinx shows the overloads that type checkers need."""
    written = re.search(r"autofunction:: fullshard\.fully_shard\((.*)\)", REFERENCE)
    assert written is not None
    names = [part.split("=")[0].strip() for part in re.sub(r"\([^()]*\)", "", written[1]).split(",")]
    assert [name for name in names if name != "*"] == list(inspect.signature(fullshard.fully_shard).parameters)


@pytest.mark.parametrize(
    "page", [DOCS / f"{name}.md" for name in ("architecture", "data-plane", "schedule", "error-detection")], ids=name_of
)
def test_files_and_classes_that_the_design_names_exist(page: Path) -> None:
    """`wing/file`, `wing.file.Name`, `Class.method` of this package, and files of tests and benchmarks."""
    source = ROOT / "src" / "fullshard"
    wings = "|".join(wing.name for wing in source.iterdir() if (wing / "__init__.py").exists())
    code = "\n".join(path.read_text() for path in source.rglob("*.py"))
    text = FENCED.sub("", page.read_text())
    for wing, file in re.findall(rf"`({wings})/(\w+)(?:\.py)?`", text):
        assert (source / wing / f"{file}.py").exists(), f"{wing}/{file}"
    for wing, file, name in re.findall(rf"`({wings})\.(\w+)\.(\w+)`", text):
        assert re.search(rf"^(class|def) {name}\b", (source / wing / f"{file}.py").read_text(), re.MULTILINE), name
    for name, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        assert re.search(rf"^class {name}\b", code, re.MULTILINE) and re.search(rf"\b{attribute}\b", code), (
            f"{name}.{attribute}"
        )
    files = {path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")}
    for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text):
        assert name in files, name


def test_commands_and_extras_that_the_pages_name_exist() -> None:
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        text = page.read_text()
        blocks = "\n".join(block for _, _, block in FENCED.findall(text))
        for command in [*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE)]:
            assert re.search(rf"^{command}:", makefile, re.MULTILINE), f"{name_of(page)}: make {command}"
    for extras in re.findall(r"^\| (`[a-z]+`(?:, `[a-z]+`)*) \|", (DOCS / "install.md").read_text(), re.MULTILINE):
        for extra in re.findall(r"`([a-z]+)`", extras):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
