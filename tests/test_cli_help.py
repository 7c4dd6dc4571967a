"""Every command explains itself with an example that its own options accept, and fast."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gemmtune.cli import COMMANDS, main

HEAVY = ("torch", "numpy", "pandas", "scipy", "matplotlib", "transformer_engine")


def modules_after(code: str) -> set[str]:
    """Which of HEAVY a fresh Python has loaded after running `code`."""
    code += f"\nimport sys; print('loaded', *[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_is_shown_in_less_than_three_tenths_of_a_second():
    def once() -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "gemmtune", "--help"], stdout=subprocess.DEVNULL, check=True
        )
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.3


def test_help_loads_no_heavy_library():
    code = "from gemmtune.cli import main\nmain(['--help'], standalone_mode=False)"
    assert modules_after(code) == set()


def test_no_command_loads_a_heavy_library_before_it_runs():
    code = f"from gemmtune.cli import main\nfor name in {list(COMMANDS)}: "
    code += "main([name, '--help'], standalone_mode=False)"
    assert modules_after(code) == set()


def test_overview_lists_every_command():
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in COMMANDS)


def example(name: str) -> list[str]:
    """The words after `gemmtune` in the example of a command's help."""
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Example:" in result.output
    context = click.Context(main, info_name="gemmtune")
    command = main.get_command(context, name)
    (line,) = re.findall(r"Example:.*?\bgemmtune ([^#)]*)", command.epilog)  # also in eval "$(…)"
    return shlex.split(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_in_a_commands_help_is_accepted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = example(name)
    assert words[0] == name
    for word in words[1:]:  # input files exist; click checks them as it reads the command line
        if Path(word).suffix and not word.startswith("-"):
            Path(word).touch()
    context = click.Context(main, info_name="gemmtune")
    command = main.get_command(context, name)
    parsed = command.make_context(name, words[1:], parent=context)
    assert [p.name for p in command.params if p.required and not parsed.params[p.name]] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_is_shown_on_one_line_of_80_columns_to_be_pasted(name):
    shown = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output
    command = main.get_command(click.Context(main, info_name="gemmtune"), name)
    assert shown.rstrip().splitlines()[-1].strip() == command.epilog


def test_an_unknown_option_is_refused_by_every_command():
    """Were options passed on unread, the test above could not fail."""
    for name in COMMANDS:
        result = CliRunner().invoke(main, [name, "--no-such-option"])
        assert result.exit_code == 2, name
        assert "No such option" in result.output, name


def test_an_unknown_command_is_one_line_and_exit_code_2():
    result = CliRunner().invoke(main, ["tuune"])
    assert result.exit_code == 2
    assert "No such command" in result.output
