"""The entry point of `nguide`, and `python -m normal_guidance.cli` where the package is not installed."""

from typing import NoReturn

from normal_guidance.cli import endings


def main() -> NoReturn:
    """Run the command that the arguments name, and end with its exit code."""
    endings.run(_command)


def _command() -> None:
    from normal_guidance.cli.commands import app

    app()


if __name__ == "__main__":
    main()
