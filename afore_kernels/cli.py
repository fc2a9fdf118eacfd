"""The `afore` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from afore_kernels import __version__
from afore_kernels.errors import AforeError


class Command(NamedTuple):
    """A subcommand: its module has `add_arguments(parser)` and `run(args) -> exit status`."""

    module: str
    extra: str
    help: str


COMMANDS = {
    "demo": Command(
        "afore_kernels.demo", "transformers", "generate text through a tier, static beside afore"
    ),
    "replay": Command(
        "afore_kernels.replay", "replay", "run recorded routing through a tier and check it"
    ),
    "calibrate": Command(
        "afore_kernels.calibrate", "", "measure the scheduler's cost estimates on this machine"
    ),
    "tune": Command(
        "afore_kernels.tune", "", "measure kernel block sizes on this GPU and write a tile table"
    ),
    "doctor": Command(
        "afore_kernels.doctor",
        "",
        "say what this machine has, what a tier will use, and what is missing",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The subcommand's exit status; 2 if an argument, a file or the tier failed, 130 if
        interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="afore", description="MoE FFN tier with overlapped expert reconfiguration."
    )
    parser.add_argument("--version", action="version", version=f"afore {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    try:
        for name, command in COMMANDS.items():
            subparser = subparsers.add_parser(name, help=command.help)
            if name in argv[:1]:  # only the module that runs is imported
                module = import_module(command.module)
                module.add_arguments(subparser)
        args = parser.parse_args(argv)
        status: int = module.run(args)
        return status
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "afore_kernels":
            raise
        extra = COMMANDS[argv[0]].extra
        message = f"needs the module {error.name}: pip install 'afore-kernels[{extra}]'"
    except (AforeError, OSError) as error:
        message = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        return 130
    print(f"afore: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
