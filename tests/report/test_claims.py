"""Claims as CSV and as Markdown, and the generated blocks of a page: what is written is read back, whatever it says."""

from __future__ import annotations

import string
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.report import blocks, claims
from testbed.report.claims import Claim
from tests.handwritten import outside_blocks

_TEXTS = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=30).map(str.strip)
_WORDS = _TEXTS.filter(bool)
_CLAIMS = st.builds(
    Claim,
    claim=_WORDS,
    source=_WORDS,
    published=_TEXTS,
    ours=_WORDS,
    interval=_WORDS,
    scale=_TEXTS,
    grade=st.sampled_from(list(claims.GRADES)),
    verdict=st.sampled_from(claims.VERDICTS),
    why=_WORDS,
    command=_WORDS,
)
_MANY = st.lists(_CLAIMS, max_size=4, unique_by=lambda claim: (claim.claim, claim.source))
_NAMES = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=8)
_LINES = st.text(max_size=20) | st.sampled_from(
    ["<!-- end -->", "<!-- generated: one -->", "<!-- generated: two -->", ""]
)
_PAGES = st.lists(_LINES, max_size=8).map("\n".join)
_BODIES = st.text(max_size=40).map(lambda text: text.strip("\n").replace("<!--", "<!"))

ONE = Claim(
    claim="a step is 4 times as fast",
    source="somebody, table 1",
    published="4.0x",
    ours="3.9x",
    interval="3.8 to 4.0 (5 seeds)",
    grade="A",
    verdict="holds",
    why="the interval includes 4.0",
    command="python -m testbed reproduce one",
)


@given(_MANY)
def test_claims_are_read_back_as_written(made: list[Claim]) -> None:
    text = claims.format_claims(made)
    assert claims.parse_claims(text, "claims.csv") == made
    assert text.count("\n") == len(made) + 1  # a diff shows a line for each claim
    table = claims.claims_table(made).splitlines()
    assert len(table) == len(made) + 2
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1  # no text breaks its row


@given(st.text(max_size=200) | _MANY.map(claims.format_claims).flatmap(lambda text: st.just(text[: len(text) // 2])))
def test_any_text_is_claims_or_a_message(text: str) -> None:
    with suppress(SpecError):
        parsed = claims.parse_claims(text, "some.csv")
        assert claims.parse_claims(claims.format_claims(parsed), "some.csv") == parsed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"verdict": "true"}, r"claim 1: verdict: .*'holds'.*found 'true'"),
        ({"why": ""}, "why is empty"),
        ({"ours": ""}, "ours is empty"),
        ({"interval": ""}, "needs an interval"),
        ({"why": "two\nlines"}, "not one line"),
        ({"claim": " a"}, "begins or ends with a space"),
    ],
)
def test_a_row_that_is_no_claim_is_named(changed: dict[str, str], message: str) -> None:
    row = ONE.model_copy(update=changed)  # which checks nothing
    with pytest.raises(SpecError, match=message):
        claims.parse_claims(claims.format_claims([row]), "claims.csv")


def test_a_claim_is_not_made_twice(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="duplicate claim"):
        claims.write_claims(tmp_path / "claims.csv", [ONE, ONE.model_copy(update={"ours": "5x"})])
    claims.write_claims(tmp_path / "claims.csv", [ONE, ONE.model_copy(update={"source": "somebody else"})])
    assert [claim.source for claim in claims.read_claims(tmp_path / "claims.csv")] == [ONE.source, "somebody else"]
    with pytest.raises(SpecError, match="cannot read"):
        claims.read_claims(tmp_path / "other.csv")


@given(_PAGES)
def test_any_page_is_filled_with_its_own_blocks_or_refused(page: str) -> None:
    try:
        parsed = blocks.parse_blocks(page, "page.md")
    except SpecError:
        return
    filled = blocks.fill_blocks(page, parsed, "page.md")
    assert blocks.fill_blocks(filled, parsed, "page.md") == filled
    assert outside_blocks(filled, "page.md") == outside_blocks(page, "page.md")
    if all(text and text == text.strip("\n") for text in parsed.values()):
        assert filled == page


@given(st.dictionaries(_NAMES, _BODIES, max_size=3), _BODIES)
def test_blocks_are_read_back_as_written_and_the_rest_is_left(texts: dict[str, str], rest: str) -> None:
    page = "".join(f"{rest}\n<!-- generated: {name} -->\nold\n<!-- end -->\n" for name in texts) + rest
    filled = blocks.fill_blocks(page, texts, "page.md")
    assert blocks.parse_blocks(filled, "page.md") == texts
    assert outside_blocks(filled, "page.md") == outside_blocks(page, "page.md")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("a\n<!-- end -->", r"page\.md, line 2: no block is open"),
        ("<!-- generated: one -->\na", "'one' is not closed"),
        ("<!-- generated: one -->\n<!-- generated: two -->\n<!-- end -->", "line 2: the block 'one' is not closed"),
        ("<!-- generated: one -->\n<!-- end -->\n<!-- generated: one -->\n<!-- end -->", "line 3: there are two"),
    ],
)
def test_a_block_out_of_place_is_named(page: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        blocks.parse_blocks(page, "page.md")


def test_a_file_has_a_place_for_each_block_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("by hand\n<!-- generated: one -->\n<!-- end -->\n", encoding="utf8")
    blocks.write_blocks(page, {"one": "1"})
    assert page.read_text(encoding="utf8") == "by hand\n<!-- generated: one -->\n1\n<!-- end -->\n"
    with pytest.raises(SpecError, match=r"has no block 'two'; add the lines <!-- generated: two -->"):
        blocks.write_blocks(page, {"one": "1", "two": "2"})
    with pytest.raises(SpecError, match=r"has the block 'one', but no program generates it; known: two"):
        blocks.write_blocks(page, {"two": "2"})
    with pytest.raises(ValueError, match="begins or ends a block"):
        blocks.write_blocks(page, {"one": "1\n<!-- end -->"})
    assert blocks.read_blocks(page) == {"one": "1"}


def test_the_page_has_the_headlines_and_counts_every_verdict(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, verdict in zip(folders, ("holds", "fails"), strict=True):
        folder.mkdir()
        claims.write_claims(folder / "claims.csv", [ONE.model_copy(update={"verdict": verdict})])
    head = claims.Headline(experiment="second", claim=ONE.claim[:9], says="so | so", figure="a.png")
    page = claims.claims_page([head], folders, "../experiments")
    second = "[so \\| so](../experiments/second/README.md)"
    judged = f"**fails**: {claims.cell(ONE.claim)}"
    assert f"| {second} | 4.0x | 3.9x (3.8 to 4.0 (5 seeds)) | \N{EN DASH} | A | {judged} | [picture](" in page
    assert "## All 2 claims of 2 experiments" in page
    claims.write_claims(folders[1] / "claims.csv", [ONE.model_copy(update={"verdict": "fails", "source": "ours"})])
    assert "| **fails**: our hypothesis: " in claims.claims_page([head], folders, "../experiments")
    for name, verdict in (("first", "holds"), ("second", "fails")):
        assert f"| [{name}](../experiments/{name}/README.md) | 1 | 0 | 0 | 0 | 1 {verdict} |" in page
    with pytest.raises(SpecError, match="second has 0 claims that begin with 'no such'"):
        claims.claims_page([head.model_copy(update={"claim": "no such"})], folders, "../experiments")
