"""Errors of libraries become errors of ours, and a value outside a table is refused."""

import errno
from pathlib import Path

import pytest

from normal_guidance.base.errors import ContentError, UserError, choose_one_of, reading
from normal_guidance.base.system import importing

NO_FILE = OSError(errno.ENOENT, "No such file or directory", "a.json")


class LibraryError(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (NO_FILE, "a.json cannot be read (No such file or directory); copy it again"),
        (ValueError("two\n lines"), "a.json cannot be read (two lines); copy it again"),
        (KeyError("label"), "a.json cannot be read ('label' is missing); copy it again"),
        (IndexError(), "a.json cannot be read (IndexError); copy it again"),
        (ValueError("x" * 10_000), f"a.json cannot be read ({'x' * 300}...); copy it again"),
        (LibraryError("bad header"), "a.json cannot be read (bad header); copy it again"),
        (ContentError("slope is '0', not a number"), "a.json is damaged: slope is '0', not a number; copy it again"),
        (UserError("give 2 levels"), "a.json: give 2 levels"),
        (UserError("a.json has no rows; add one"), "a.json has no rows; add one"),
    ],
)
def test_what_goes_wrong_in_reading_names_the_path_and_what_to_do(raised: Exception, message: str) -> None:
    with pytest.raises(UserError) as refused, reading(Path("a.json"), "copy it again", LibraryError):
        raise raised
    assert str(refused.value) == message


def test_reading_says_what_is_wrong_in_other_words() -> None:
    said = pytest.raises(UserError, match=r"^a.db is not a table \(x\); ask$")
    with said, reading("a.db", "ask", wrong="is not a table"):
        raise ValueError("x")


@pytest.mark.parametrize("raised", [LibraryError(), KeyboardInterrupt(), MemoryError()])
def test_reading_lets_other_errors_pass(raised: BaseException) -> None:
    with pytest.raises(type(raised)), reading("a.json", "copy it again"):
        raise raised


def test_what_is_not_in_the_table_is_refused_and_the_table_listed() -> None:
    table = {"ng": 1, "entropy": 2}
    choose_one_of("method", "ng", table)
    with pytest.raises(UserError, match=r"^method 'gn' is unknown; choose one of ng, entropy$"):
        choose_one_of("method", "gn", table)
    with pytest.raises(UserError, match=r"^seed 7 is unknown, too high; choose one of 1, 2$"):
        choose_one_of("seed", 7, (1, 2), hint=", too high")
    with pytest.raises(UserError, match="is unknown"):
        choose_one_of("method", [], table)  # not hashable


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    message = r"^masks need nothere; pip install 'normal-guidance\[dicom\]'$"
    with pytest.raises(UserError, match=message), importing("dicom", "masks need nothere"):
        import nothere  # noqa: F401
