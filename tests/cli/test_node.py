"""The command nguide node: its options, its settings file, and mistakes in them."""

import pytest

from normal_guidance.clinic.node import node as nodes
from normal_guidance.clinic.predict import predicting
from normal_guidance.fit import bundle
from small_command import nguide, output_of


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """What the command would start a node with."""
    found = []

    def stop(settings, predictor):
        found.append((settings, predictor))
        raise SystemExit(0)

    class Bundle:
        expects = None

        def load_encoder(self, *_, **options):
            assert options["offline"]
            return options

    monkeypatch.setattr(nodes, "run_node", stop)
    monkeypatch.setattr(bundle, "load_bundle", lambda folder: Bundle())
    monkeypatch.setattr(predicting, "Predictor", lambda *given: given)
    return found


def test_the_settings_file_has_the_names_of_the_options(chosen, tmp_path):
    settings = tmp_path / "node.toml"
    settings.write_text(
        'model = "bundle"\naet = "HEAD-AI"\nport = 104\nfrom = ["CT1@127.0.0.1", "CT2@localhost:11113"]\n'
        'to = ["PACS@127.0.0.1:4242"]\ntake = ["modality=CT thickness=2-6"]\nsettle = 30\n'
        "commit = true\nmax-series = 7\nmax-gb = 2\nkeep = 3\n"
    )
    nguide("node", tmp_path / "state", "--settings", settings, "--port", 11200)
    ((found, _),) = chosen
    assert (found.listening.aet, found.listening.port, found.listening.address) == ("HEAD-AI", 11200, "127.0.0.1")
    assert [str(one) for one in found.senders] == ["CT1@127.0.0.1", "CT2@localhost:11113"]
    assert [(one.name, one.identity.commit) for one in found.destinations] == [("PACS@127.0.0.1:4242", True)]
    assert (found.taking.settle, found.taking.rules[0].ranges) == (30, {"thickness": (2.0, 6.0)})
    assert (found.limits.series, found.limits.bytes, found.keep) == (7, 2_000_000_000, 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("modle = 'bundle'", "there is no option 'modle'; the names are address, aet,"),
        ("settings = 'other.toml'", "there is no option 'settings'"),
        ("port = ", "node.toml cannot be read (Invalid value"),
        ("port = 99999", "65535"),
    ],
)
def test_a_wrong_settings_file_is_named(chosen, tmp_path, content, complaint):
    settings = tmp_path / "node.toml"
    settings.write_text(content)
    words = (tmp_path / "state", "--settings", settings, "--model", "bundle", "--from", "A@127.0.0.1")
    assert complaint in output_of("node", *words, code=2)
    assert chosen == []
