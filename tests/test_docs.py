"""Pages that are generated from tables: one that is stale gets named and generated anew (`make lint` finds those)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.cli import make_app
from testbed.codecs.catalogue.table import ROWS
from testbed.commands import docs
from testbed.errors import UserError


def test_every_link_of_a_page_leads_somewhere() -> None:
    folders = ("", "docs/", "experiments/**/", "examples/**/", "netem_profiles/", "testbed/**/", "tests/**/")
    pages = [page for folder in folders for page in docs.ROOT.glob(f"{folder}*.md")]
    texts = {page: re.sub(r"^```.*?^```", "", page.read_text(encoding="utf8"), flags=re.S | re.M) for page in pages}
    lost = []
    for page, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not link.startswith("http") and not (target.exists() and heading in ("", *_headings(texts.get(target)))):
                lost.append(f"{page.relative_to(docs.ROOT)}: {link}")
    assert len(pages) > 50
    assert lost == []


def _headings(text: str | None) -> set[str]:
    """Return the anchors of a page's headings, as hosts of Markdown make them."""
    titles = re.findall(r"^#+ (.*)$", text or "", flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_codec_and_module_is_listed() -> None:
    readme = (docs.ROOT / "testbed" / "codecs" / "README.md").read_text(encoding="utf8")
    assert [row.name for row in ROWS if f"| `{row.name}` |" not in readme] == []
    modules = (docs.ROOT / "testbed" / "codecs").rglob("*.py")
    assert [str(path) for path in modules if not path.stem.startswith("__") and f"`{path.stem}`" not in readme] == []


def test_every_folder_lists_its_modules() -> None:
    unlisted = []
    for init in (docs.ROOT / "testbed").glob("*/**/__init__.py"):
        names = [path.stem for path in init.parent.glob("*.py") if not path.stem.startswith("__")]
        names += [path.parent.name for path in init.parent.glob("*/__init__.py")]
        said = ast.get_docstring(ast.parse(init.read_text(encoding="utf8"))) or ""
        unlisted += [f"{init.parent.name}/{name}" for name in names if not re.search(rf"\b{name}\b", said)]
    assert unlisted == []


def test_a_stale_page_is_named_and_generated_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    with pytest.raises(UserError, match="not a checkout"):
        list(docs.stale_pages())
    (tmp_path / "pyproject.toml").touch()
    whole = tmp_path / "whole.md"
    monkeypatch.setattr(docs, "_whole_pages", lambda: {"whole.md": lambda: "all of it\n"})
    page.write_text("by hand\n<!-- generated: codecs -->\nold\n<!-- end -->\nby hand too\n", encoding="utf8")
    told = CliRunner().invoke(make_app(), ["docs", "--check"])
    assert told.exit_code == 1
    assert "docs/page.md is stale" in told.stdout
    assert "whole.md is stale" in told.stdout
    assert not whole.exists()
    assert CliRunner().invoke(make_app(), ["docs"]).exit_code == 0
    text = page.read_text(encoding="utf8")
    assert text.startswith("by hand\n<!-- generated: codecs -->\n| codec |")
    assert text.endswith("|\n<!-- end -->\nby hand too\n")
    assert whole.read_text(encoding="utf8") == "all of it\n"
    assert CliRunner().invoke(make_app(), ["docs", "--check"]).exit_code == 0
