"""The TAB key: the shells' own protocol in a process of its own, and names that are those of the tables."""

import os
import shutil
import subprocess
import sys
from typing import get_args

import pytest
from typer.testing import CliRunner

from normal_guidance.cli import command, features, options, scans, study
from normal_guidance.cli.commands import app
from normal_guidance.core.methods import BEYOND, FIELD, METHODS
from normal_guidance.core.regularizers import REGULARIZERS
from normal_guidance.scans.features import convert as import_features
from normal_guidance.scans.features.convert import EXPORT_FORMATS
from normal_guidance.scans.features.encoders import ENCODERS, Precision
from normal_guidance.scans.features.windows import WINDOWS
from normal_guidance.scans.index.challenges import LABELS
from normal_guidance.scans.index.indexing import SOURCES
from normal_guidance.scans.phantom.drafts import ODDITIES
from normal_guidance.scans.phantom.phantom_files import COMPRESSIONS, LAYOUTS, MIXED
from normal_guidance.scans.phantom.plan import ANATOMIES
from normal_guidance.study.experiment import DATASETS
from normal_guidance.sweep.config import OptimizerName, ScheduleName

PROGRAM = """
import sys
from normal_guidance.cli.commands import app
try:
    app(prog_name="nguide")
finally:
    heavy = {"torch", "numpy", "pandas", "pyarrow", "pydicom"} & sys.modules.keys()
    assert not heavy, heavy
"""
"""As the installed command does; torch and its like must not be imported for it."""


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("nguide do", ["doctor"]),
        ("nguide sweep store --methods ", ["all", "beyond", "field", *METHODS, *BEYOND, *FIELD]),
        ("nguide sweep store --methods abmil,me", ["abmil,mean"]),
        ("nguide sweep store --negatives o", ["own"]),
        ("nguide sweep store --optimizer ", get_args(OptimizerName)),
        ("nguide sweep store --schedule ", get_args(ScheduleName)),
        ("nguide encode index --encoder e", ["efficientnet-lite0"]),
        ("nguide encode index --window head,", [f"head,{name}" for name in features.WINDOWS if name != "head"]),
        ("nguide index rsna-", ["rsna-ich", "rsna-pe", "rsna-at"]),
        ("nguide weights import v", ["vit-b16-imagenet"]),
        ("nguide phantom f", ["folder"]),
        ("nguide phantom folder out --compression jpeg2", ["jpeg2000"]),
        ("nguide store export s --format h", ["hdf5"]),
        ("nguide reproduce s", ["semi-synthetic"]),
        ("nguide reproduce semi-synthetic --negatives n", ["none"]),
        ("nguide experiment store --negatives u", ["uniform"]),
        ("nguide view ", []),  # the shell goes on with files
    ],
)
def test_what_fits_is_offered(line, names):
    """What a line that ends at the cursor is offered, as bash asks; zsh asks the same functions."""
    asked = {"_NGUIDE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = CliRunner().invoke(app, [], env=asked, prog_name="nguide")
    assert (result.exit_code, result.stderr, result.stdout.split()) == (0, "", list(names))


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_scripts_are_printed_and_installed(shell, tmp_path):
    environment = {
        **os.environ,
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",  # the shell is named, and not looked for
        "HOME": str(tmp_path),
    }
    for option in ("--show-completion", "--install-completion"):
        command = [sys.executable, "-c", PROGRAM, option, shell]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert result.stderr == ""
        if option == "--show-completion":
            assert f"_NGUIDE_COMPLETE=complete_{shell}" in result.stdout
    written = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert f"_NGUIDE_COMPLETE=complete_{shell}" in written


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_real_bash_completes(tmp_path):
    """The printed script, sourced by bash, and asked as the TAB key asks it."""
    nguide = tmp_path / "nguide"
    nguide.write_text(f"#!{sys.executable}\n{PROGRAM}")
    nguide.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 nguide --show-completion bash)"
        COMP_WORDS=(nguide sweep store --divergence forward_kl,) COMP_CWORD=4
        _nguide_completion nguide
        echo "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["forward_kl,reverse_kl", "forward_kl,squared_error"]


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (options.METHODS, METHODS),
        (options.BEYOND, BEYOND),
        (options.FIELD, FIELD),
        (options.REGULARIZERS, REGULARIZERS),
        (command.ENCODERS, ENCODERS),
        (features.WINDOWS, WINDOWS),
        (command.SOURCES, SOURCES),
        (scans.LAYOUTS, LAYOUTS),
        (scans.LABELS, LABELS),
        (study.DATASETS, DATASETS),
        (scans.ANATOMIES, ANATOMIES),
        (scans.ODDITIES, ODDITIES),
        (scans.COMPRESSIONS, (*COMPRESSIONS, MIXED)),
        (features.FORMATS, EXPORT_FORMATS),
        (features.IMPORT_FORMATS, import_features.IMPORT_FORMATS),
        (options.PRECISIONS, ("auto", *get_args(Precision))),
    ],
)
def test_what_is_offered_is_what_the_tables_have(names, table):
    assert names == tuple(table)
