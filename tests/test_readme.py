"""What README.md and docs/ show is what happens: commands print that, code runs."""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridcp.cli import run

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def blocks(kind, language):
    """(page, argument, code) of each fenced block behind `<!-- kind: argument -->`."""
    pattern = re.compile(rf"<!-- {kind} (.*?) -->\n```{language}\n(.*?)```", re.DOTALL)
    return [
        pytest.param(page, argument, code, id=f"{page.name}-{argument}")
        for page in PAGES
        for argument, code in pattern.findall(page.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("page", "command", "shown"), blocks("output of:", "text"))
def test_commands_print_what_the_pages_show(page, command, shown, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in command.split(" && "):
        capsys.readouterr()
        assert run(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out.rstrip() + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(shown, printed), encoding="utf-8")
    else:
        assert printed == shown, "if that is meant: UPDATE_GOLDEN=1 pytest tests/test_readme.py"


def _execute(code):
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})
    assert dist.is_initialized()


@pytest.mark.parametrize(("page", "ranks", "code"), blocks("run on", "python"))
def test_code_on_the_pages_runs(run_distributed, page, ranks, code):
    run_distributed(_execute, int(ranks.split()[0]), code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
