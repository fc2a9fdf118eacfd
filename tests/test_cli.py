from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from afore_kernels import __version__, cli
from afore_kernels.errors import PeerLost


@pytest.fixture
def demo(monkeypatch):
    """Replaces the module of `afore demo`; set `run` to choose what it does."""
    module = SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--size", type=int))
    imported = []

    def import_module(name):
        imported.append(name)
        return module

    monkeypatch.setattr(cli, "import_module", import_module)
    module.imported = imported
    return module


def raises(error):
    def run(args):
        raise error

    return run


def test_status_is_the_subcommands(demo):
    demo.run = lambda args: args.size
    assert cli.main(["demo", "--size", "7"]) == 7
    assert demo.imported == ["afore_kernels.demo"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PeerLost("worker 3 is gone"), "afore: PeerLost: worker 3 is gone\n"),
        (FileNotFoundError(2, "No such file", "x.npz"), "No such file: 'x.npz'\n"),
        (
            ModuleNotFoundError("no", name="rich"),
            "rich: pip install 'afore-kernels[transformers]'\n",
        ),
    ],
)
def test_expected_errors_are_one_line(demo, capsys, error, line):
    demo.run = raises(error)
    assert cli.main(["demo"]) == 2
    captured = capsys.readouterr().err
    assert captured.endswith(line)
    assert captured.count("\n") == 1


def test_interrupt_has_its_status(demo):
    demo.run = raises(KeyboardInterrupt())
    assert cli.main(["demo"]) == 130


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ModuleNotFoundError("a bug", name="afore_kernels.gone")]
)
def test_bugs_keep_their_traceback(demo, error):
    demo.run = raises(error)
    with pytest.raises(type(error), match="a bug"):
        cli.main(["demo"])


@pytest.mark.parametrize("argv", [[], ["unknown"], ["demo", "--unknown"]])
def test_usage_errors(demo, argv):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2


def test_version_imports_no_torch():
    code = (
        "import sys; from afore_kernels.cli import main\n"
        "try: main(['--version'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"afore {__version__}\n"
