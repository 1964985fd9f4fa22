"""Rules, addresses, and the audit log: the small parts, alone."""

import json

import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.node.incoming import parse_rule, why_ignored
from normal_guidance.clinic.node.partners import Audit, Callers, parse_peer
from normal_guidance.clinic.node.series_queue import Limits, SeriesQueue

HEAD = {"modality": "CT", "body": "Head", "description": "5mm AXIAL brain", "thickness": "5.000000", "files": "30"}


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        ("modality=CT", True),
        ("modality=ct body=HEAD", True),
        ("modality=MR", False),
        ("description=*axial*", True),
        ("description=axial", False),
        ('description="5mm axial*"', True),
        ("thickness=2-6", True),
        ("thickness=5", True),
        ("thickness=0.5-4.9", False),
        ("files=20-100", True),
        ("files=31-100", False),
        ("protocol=*", True),
        ("protocol=?*", False),
    ],
)
def test_a_rule_fits_if_each_of_its_conditions_does(rule, fits):
    assert (why_ignored([parse_rule(rule)], HEAD) is None) == fits


def test_one_rule_of_several_is_enough_and_none_takes_all():
    rules = [parse_rule("modality=MR"), parse_rule("body=HEAD")]
    assert why_ignored(rules, HEAD) is None
    assert why_ignored([], {}) is None
    why = "no rule takes it: modality does not fit MR; body does not fit HEAD"
    assert why_ignored(rules, {**HEAD, "body": "FOOT"}) == why
    assert why_ignored([parse_rule("thickness=0-1000")], {}) is not None  # it states no thickness


@pytest.mark.parametrize(
    ("parse", "text", "complaint"),
    [
        (parse_rule, "", "is empty"),
        (parse_rule, "CT", "there is no condition 'CT'"),
        (parse_rule, "colour=red", "there is no condition 'colour'"),
        (parse_rule, "thickness=thin", "thickness=thin is not a condition; give a number"),
        (parse_rule, "thickness=6-", "give a number or a range such as 2-6"),
        (parse_rule, "modality=", "give a pattern"),
        (parse_rule, "description='open", "quote without its end"),
        *((parse_peer, text, "is not AET@HOST; write") for text in ("PACS", "PACS@", "@host:1", "P@ho st")),
        *((parse_peer, text, "is not an AE title") for text in ("A\\B@host", "P" * 17 + "@host")),
        (parse_peer, "PACS@host:99999", "there is no port 99999"),
    ],
)
def test_a_wrong_rule_or_partner_is_named(parse, text, complaint):
    with pytest.raises(UserError, match=complaint):
        parse(text)


def test_partners_are_known_by_title_and_address():
    callers = Callers((parse_peer("CT@127.0.0.1"), parse_peer("MR@[::1]:104")), (parse_peer("PACS@127.0.0.1:104"),))
    asked = [(title, address) for title in ("CT", "MR", "PACS") for address in ("127.0.0.1", "::1")]
    senders = [("CT", "127.0.0.1"), ("MR", "::1")]
    assert [caller for caller in asked if callers.sender(*caller)] == senders
    assert [caller for caller in asked if callers.may_call(*caller)] == [*senders, ("PACS", "127.0.0.1")]
    assert not callers.knows("10.0.0.1")
    assert str(parse_peer("MR@[::1]:104")) == "MR@[::1]:104"
    with pytest.raises(UserError, match="is unknown"):
        _ = parse_peer("A@nowhere.invalid").addresses


def test_the_audit_log_is_rotated_and_the_oldest_is_dropped(tmp_path):
    audit = Audit(tmp_path / "audit.jsonl", largest=300, kept=2)
    for number in range(40):
        audit.write("sent", number=number, nothing=None)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    lines = [json.loads(line) for name in reversed(files) for line in (tmp_path / name).read_text().splitlines()]
    numbers = [line["number"] for line in lines]
    assert numbers == list(range(numbers[0], 40))
    assert all(set(line) == {"time", "event", "number"} for line in lines)


def test_an_older_queue_is_not_thrown_away(tmp_path):
    SeriesQueue(tmp_path / "queue.db", Limits())._database.execute("PRAGMA user_version=1")
    with pytest.raises(
        UserError, match=r"normal-guidance 0\.2, or name another folder once that has sent what waits in it"
    ):
        SeriesQueue(tmp_path / "queue.db", Limits())
