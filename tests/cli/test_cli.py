"""The command line from outside: output, exit codes, and what it never does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hybridcp.cli import app, run
from hybridcp.layout import Layout

GOLDEN = Path(__file__).parent / "golden"
PLAN = ["plan", "--heads", "32", "--ranks", "256"]


def command(*arguments, **environment):
    """Run in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "hybridcp.cli", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        env=os.environ | {"PYTHONUTF8": "1"} | environment,
        check=False,
    )


def check_golden(name, text):
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"{name} changed; if that is meant: UPDATE_GOLDEN=1 pytest tests/cli"
    )


def key_paths(value, prefix=""):
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in key_paths(v, f"{prefix}.{k}")]
    if isinstance(value, list):
        return key_paths(value[0], f"{prefix}[]") if value else [f"{prefix}[]"]
    return [prefix]


@pytest.fixture
def layout_file(tmp_path):
    path = tmp_path / "layout.yaml"
    Layout(ulysses_degree=2, ring_degree=4).save(path)
    return str(path)


def test_plan_table(capsys):
    assert run(PLAN) == 0
    output = capsys.readouterr()
    assert output.err == ""
    check_golden("plan_32_256.txt", output.out)
    lines = output.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "Next:     hybridcp plan --heads 32 --ranks 256 --out layout.yaml"


def test_json_is_the_whole_output(capsys):
    assert run([*PLAN, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    document = json.loads(output.out)
    check_golden("plan_json_keys.txt", "\n".join(key_paths(document)) + "\n")
    assert document["candidates"][0]["layout"]["ulysses_degree"] == 8


def test_options_of_every_command():
    commands = typer.main.get_command(app).commands
    lines = [
        f"{name} {' '.join(option.opts)} "
        + ("required" if option.required else str(option.default))
        for name, each in commands.items()
        for option in each.params
    ]
    check_golden("options.txt", "\n".join(lines) + "\n")


def test_help_in_typers_own_runner():
    result = CliRunner().invoke(app, ["plan", "--help"])
    assert result.exit_code == 0
    assert "--kv-heads" in result.output


@pytest.mark.parametrize("name", [[], ["plan"], ["check"], ["show"]], ids=str)
def test_help_starts_with_two_examples(name, capsys):
    assert run([*name, "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1] == "Examples:"
    assert lines[2].startswith("hybridcp ")
    assert lines[3].startswith("hybridcp ")


def test_out_saves_the_layout_and_the_command(tmp_path, capsys):
    path = tmp_path / "my layout.yaml"
    assert run([*PLAN, "--kv-heads", "8", "--out", str(path)]) == 0
    output = capsys.readouterr()
    assert output.err == f"wrote {path}\n"
    assert f"hybridcp check '{path}' --seq-len 1M --mask causal" in output.out
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# hybridcp plan --heads 32 --ranks 256 --kv-heads 8\n")
    assert Layout.load(path) == Layout(ulysses_degree=8, ring_degree=32)


def test_top_limits_the_table(capsys):
    assert run([*PLAN, "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "… and 4 slower splits" in out


def test_check_proves(layout_file, capsys):
    assert run(["check", layout_file, "--seq-len", "4k", "--mask", "causal & documents:1k*4"]) == 0
    out = capsys.readouterr().out
    assert f"{4 * (1024 * 1025 // 2)} (query, key) pairs" in out
    assert out.splitlines()[-1].startswith("Next:   hybridcp show ")


def test_a_failed_proof_is_the_answer_no(layout_file, capsys, monkeypatch):
    from hybridcp.errors import ScheduleError

    def fails(schedule):
        raise ScheduleError("ring position 3, block of 1: computes a pair twice")

    # The module, not the function that the package exports under the same name.
    monkeypatch.setattr(sys.modules["hybridcp.proof"], "check", fails)
    assert run(["check", layout_file]) == 1
    assert capsys.readouterr().err == (
        "error: ring position 3, block of 1: computes a pair twice\n"
    )


def test_show(layout_file, capsys):
    assert run(["show", layout_file, "--seq-len", "64", "--ranks-per-node", "4"]) == 0
    out = capsys.readouterr().out
    assert "node 0  0:0.0  1:0.1  2:1.0  3:1.1" in out
    assert "rank 0 holds [0, 8): 8 tokens" in out
    assert "rank 1 holds [56, 64): 8 tokens" in out
    assert "ring 3   1.00  ####################" in out


def test_balanced_layouts_are_shown_and_proved_for_a_mask(tmp_path, capsys):
    path = str(tmp_path / "layout.yaml")
    Layout(ulysses_degree=2, ring_degree=2, sharding="balanced").save(path)
    options = [path, "--seq-len", "64k", "--mask", "causal & documents:40k,24k"]
    assert run(["show", *options]) == 0
    out = capsys.readouterr().out
    assert "65536 tokens, balanced" in out
    assert "rank 0 holds [0, 10240) + [30720, 36864): 16384 tokens" in out
    assert "ring 1   1.00  ####################" in out
    assert run(["check", *options]) == 0
    assert "the busiest ring position has 1.00 x the mean work" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 7, 256, 1000])
@pytest.mark.parametrize("order", ["ulysses_inner", "ring_inner"])
def test_show_fits_the_page(tmp_path, ranks, order, capsys):
    path = tmp_path / "layout.yaml"
    degree = 8 if ranks % 8 == 0 else 1
    Layout(ulysses_degree=degree, ring_degree=ranks // degree, order=order).save(path)
    assert run(["show", str(path), "--mask", "window:4095", "--ranks-per-node", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert max(map(len, lines)) <= 100
    assert len(lines) < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command"),
        (["bogus"], "No such command 'bogus'"),
        (["plan"], "Missing option '--heads'"),
        (["plan", "--heads", "0", "--ranks", "8"], "heads must be a whole number ≥ 1, got 0"),
        (["plan", "--heads", "8", "--ranks", "0"], "ranks must be a whole number ≥ 1, got 0"),
        (["plan", "--heads", "x", "--ranks", "8"], "Invalid value for '--heads'"),
        ([*PLAN, "--kv-heads", "5"], "kv_heads must divide heads"),
        ([*PLAN, "--seq-len", "foo"], "seq_len must be a whole number of tokens"),
        ([*PLAN, "--cluster", "h100"], "did you mean h100-8?"),
        ([*PLAN, "--cluster", "missing.yaml"], "cannot read the cluster file missing.yaml"),
        ([*PLAN, "--clutser", "h100-8"], "--cluster"),
        ([*PLAN, "--mask", "casual"], "a mask is `causal`"),
        ([*PLAN, "--mask", "documents:1k"], "lengths sum to 1024"),
        ([*PLAN, "--dtype", "int8"], "dtype must be one of"),
        ([*PLAN, "--top", "0"], "'--top'"),
        ([*PLAN, "--out", "/nonexistent/layout.yaml"], "cannot write /nonexistent/layout.yaml"),
        (["check", "/nonexistent.yaml"], "cannot read the layout file /nonexistent.yaml"),
        (["show", "/"], "cannot read the layout file /"),
    ],
)
def test_bad_questions(arguments, message, capsys):
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds nothing"),
        (b"\xff\xfe\x00\x01", "not a text file"),
        (b"- 1\n- 2\n", "holds list"),
        (b"ulysses_degree: [\n", "not valid YAML"),
        (b"ulysses_degree: 2\nring_degree: 2\nflavour: 3\n", "flavour: unknown key"),
        (b"ulysses_degree: 2\nring_degree: 0\n", "ring_degree"),
        (b"ulysses_degree: 2\n", "ring_degree is missing"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "show"])
def test_bad_layout_files(tmp_path, verb, content, message, capsys):
    path = tmp_path / "layout.yaml"
    path.write_bytes(content)
    assert run([verb, str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {path}")
    assert message in output.err


def test_no_layout_fits_is_the_answer_no(tmp_path, capsys):
    out = tmp_path / "layout.yaml"
    assert run(["plan", "--heads", "32", "--ranks", "1", "--out", str(out)]) == 1
    output = capsys.readouterr()
    assert "No layout of 1 rank fits" in output.out
    assert output.out.splitlines()[-1] == "Next:     hybridcp plan --heads 32 --ranks 2"
    assert "is not written" in output.err
    assert not out.exists()


def test_version(capsys):
    import hybridcp

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"hybridcp {hybridcp.__version__}\n"


def test_in_a_process_of_its_own(tmp_path):
    done = command(*PLAN, NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / "plan_32_256.txt").read_text(encoding="utf-8")
    assert command("plan", "--heads", "0", "--ranks", "2").returncode == 2
    narrow = command(*PLAN, "--top", "2", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert (narrow.returncode, narrow.stderr) == (0, "")
    assert command("plan", "--heads", "32", "--ranks", "1").returncode == 1


def test_planning_never_imports_torch():
    code = (
        "import sys; from hybridcp.cli import run; code = run(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'rich.table'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *PLAN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "hybridcp.cli", *PLAN, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


def test_no_colour_in_a_pipe_or_when_unwanted(monkeypatch):
    from hybridcp.cli import output

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.emphasized("Best") != "Best"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.emphasized("Best") == "Best"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert output.emphasized("Best") == "Best"
