"""`--json`: one strict document on standard output; the tests of each command compare it with what is written."""

import json
import math
from pathlib import Path

from normal_guidance.cli.command import print_json
from normal_guidance.core.methods import BEYOND, EVERY_METHOD, METHODS
from small_command import document, nguide


def test_numbers_that_are_none_are_null(capsys):
    print_json({"a": [math.nan, 1.5], "b": (-math.inf, Path("x")), 3: None})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None, "x"], "3": None}


def test_methods():
    told = document("methods")
    assert [method["name"] for method in told] == list(EVERY_METHOD)
    assert {"ng", "mhng"} <= {method["name"] for method in told if method["guided"]}
    assert not any(method["guided"] for method in told if method["name"] in ("abmil", "transmil"))
    assert next(method for method in told if method["name"] == "max")["parameters"] == 769  # 768 weights and a bias
    assert [method["name"] for method in told if method["when"]] == list(BEYOND)
    printed = nguide("methods").output
    assert all(name in printed for name in METHODS)
    assert "4,743,169" in printed
    assert "whole_bells, whole_bells_ng: Use it for findings in one block of slices" in printed
