"""What importing loads: planning and proving must answer without torch."""

import subprocess
import sys

import pytest

PURE = [
    "hybridcp",
    "hybridcp.errors",
    "hybridcp.bands",
    "hybridcp.masks",
    "hybridcp.sharding",
    "hybridcp.yaml_files",
    "hybridcp.balance",
    "hybridcp.ring_load",
    "hybridcp.layout",
    "hybridcp.mask_text",
    "hybridcp.schedule",
    "hybridcp.proof",
    "hybridcp.planner",
    "hybridcp.cli",
]


def loaded_by(statements):
    """Top-level modules that a fresh interpreter has after running these statements."""
    code = f"{statements}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_load_no_torch(module):
    assert not loaded_by(f"import {module}") & {"torch", "numpy", "matplotlib"}


def test_a_layout_is_proved_without_torch():
    statements = (
        "import hybridcp\n"
        "layout = hybridcp.Layout(ulysses_degree=8, ring_degree=32)\n"
        "hybridcp.check(hybridcp.Schedule(layout.shard(4096), hybridcp.causal()))"
    )
    assert not loaded_by(statements) & {"torch", "numpy"}


def test_torch_is_loaded_when_the_executor_is_used():
    assert "torch" in loaded_by("import hybridcp; hybridcp.HybridAttention")


def test_importing_the_executor_loads_no_planner():
    statements = (
        "import hybridcp.attention.hybrid, sys\n"
        "assert not any(name.startswith('hybridcp.planner') for name in sys.modules)"
    )
    loaded_by(statements)


def test_every_public_name_exists():
    loaded_by("import hybridcp; [getattr(hybridcp, name) for name in hybridcp.__all__]")


def test_an_unknown_name_is_an_attribute_error():
    loaded_by(
        "import hybridcp\n"
        "try: hybridcp.nothing\n"
        "except AttributeError as problem: assert \"'nothing'\" in str(problem)\n"
        "else: raise AssertionError"
    )
