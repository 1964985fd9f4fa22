"""The demo at a small size: it prints the table it promises and draws the picture it names."""

from pathlib import Path

from typer.testing import CliRunner

from normal_guidance.cli import app
from normal_guidance.core.models import METHODS

runner = CliRunner()


def test_demo_compares_methods_and_draws(tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--scans", "128", "--epochs", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for row in ("Centered Gaussian", "ABMIL", "Guidance", "Bayes oracle"):
        assert row in result.output
    assert "0.997" in result.output  # the oracle's slice AUROC on the demo's own test set
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_a_file_is_no_folder_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "taken")])
    assert result.exit_code == 2
    assert "is a file; name a folder" in " ".join(result.output.split())


def test_wrong_values_are_refused() -> None:
    result = runner.invoke(app, ["demo", "--scans", "3"])
    assert result.exit_code == 2
    assert "--scans" in result.output


def test_methods_lists_the_table() -> None:
    result = runner.invoke(app, ["methods"])
    assert result.exit_code == 0
    assert all(name in result.output for name in METHODS)
    assert "4,743,169" in result.output
