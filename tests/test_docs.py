"""Every block of Python in the docs is run, page by page in one folder; links inside the docs lead somewhere."""

import re
from pathlib import Path

import pytest
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = Document(page.read_text(), page.name)
    for region in CodeBlockParser("python", evaluator=lambda example: None)(document):
        line = document.text[: region.start].count("\n") + 1
        exec(compile("\n" * line + str(region.parsed), page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_lines_are_short_and_links_lead_to_files(page: Path):
    text = re.sub(r"^```console.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120] == []
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
