"""Names and codes of findings, as users give them and as files record them."""

import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.manifest import Finding, parse_findings, read_findings


def test_names_and_codes_survive_a_file():
    findings = (Finding("any", "1386000", "Intracranial hemorrhage"), Finding("epidural"))
    assert read_findings([one.as_json() for one in findings]) == findings
    assert [str(one) for one in findings] == ["any (Intracranial hemorrhage, SNOMED CT 1386000)", "epidural"]
    assert parse_findings(" any = 1386000 , epidural ") == (Finding("any", "1386000"), Finding("epidural"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("any,", "a name is empty"),
        ("", "a name is empty"),
        ("any,Any", "finding 'Any' occurs twice"),
        ("../up", "finding '../up': a name has up to 32 letters"),
        ("-x", "finding '-x': a name"),
        ("a" * 33, "a name has up to 32 letters"),
        ("any=", "code '' is not an identifier of SNOMED CT"),
        ("any=I60", "code 'I60' is not an identifier of SNOMED CT"),
    ],
)
def test_wrong_names_and_codes_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_findings(text)


@pytest.mark.parametrize("content", [3, [3], [{"name": "../up"}], [{"nome": "any"}], [{"name": "a"}, {"name": "A"}]])
def test_damaged_findings_are_value_errors(content):
    with pytest.raises(ValueError, match=r"not a list|not an object|another one|unknown|twice"):
        read_findings(content)
