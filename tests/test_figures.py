"""The list of figures: each is on its page, and one that is older than its code is found."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

from benchmarks.figures import ROOT, Figures, find_changes, read_figures


def test_each_entry_has_its_table_its_program_and_its_code() -> None:
    for figures in read_figures():
        assert figures.line in (ROOT / figures.page).read_text(), figures
        words = figures.command.split()
        program = words[words.index("-m") + 1].replace(".", "/") + ".py" if "-m" in words else words[-1]
        programs = [word for word in (*words, program) if word.endswith(".py")]
        assert programs and all((ROOT / one).is_file() for one in programs), figures
        assert [path for path in figures.code if not (ROOT / path).exists()] == [], figures


def test_a_figure_is_old_after_a_commit_to_its_code(tmp_path: Path) -> None:
    def git(*arguments: str, day: str = "2026-11-01") -> None:
        when = {"GIT_COMMITTER_DATE": f"{day} 12:00:00", "GIT_AUTHOR_DATE": f"{day} 12:00:00"}
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, env=when)

    git("init", "-q")
    made = [
        ("2026-11-01", "engine.py", "a = 'x'"),
        ("2026-11-03", "other.py", "b = 1"),
        ("2026-11-05", "engine.py", "a = 2"),
        ("2026-11-07", "engine.py", "# why\na = 2\nprint(f'{a} words')"),
        ("2026-11-09", "engine.py", "a = 2\nprint('other words')"),
    ]
    for day, name, text in made:
        (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", f"Change {name}", day=day)

    def changes(day: int) -> list[str]:
        return find_changes(Figures("README.md", "| a |", "a.py", date(2026, 11, day), ("engine.py",)), tmp_path)

    assert changes(3) == changes(5) == ["engine.py"]
    assert changes(7) == changes(9) == []
