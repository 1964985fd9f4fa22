"""`python -m normal_guidance.cli`: the command `nguide` where the package is on the path but not installed."""

from normal_guidance.cli import app

if __name__ == "__main__":
    app()
