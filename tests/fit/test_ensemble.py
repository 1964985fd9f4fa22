"""An ensemble is the mean of its members, a file that does not fit its weights is refused, features have one size."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from normal_guidance.core.bags import Bags
from normal_guidance.fit.ensemble import Ensemble, MemberKind, Members, Scaling, fit_scalings
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.stack import initial_model


def members(method: str, count: int, **about: object) -> tuple[Members, list[torch.nn.Module]]:
    """A kind, and its members as plain models."""
    scaling = Scaling(torch.randn(4), torch.rand(4) + 0.5)
    plain = [initial_model(Config(method, seed=seed), 4) for seed in range(1, count + 1)]
    weights = {
        name: torch.stack([dict(one.named_parameters())[name].detach() for one in plain])
        for name, _ in plain[0].named_parameters()
    }
    return Members(MemberKind(method, "each", **about), scaling, weights), plain


def two_kinds() -> tuple[Ensemble, list[list[torch.nn.Module]]]:
    (first, one), (second, two), (third, three) = (
        members("evidence", 2), members("abmil", 1), members("mean", 3, attends=False)
    )  # fmt: skip
    return Ensemble([first, second, third]).eval(), [one, two, three]


@torch.no_grad()
def test_kinds_count_alike_and_members_within_their_kind() -> None:
    ensemble, plain = two_kinds()
    scans = shifted_mean(5, seed=4, features=4)
    made, begin = ensemble(scans.features, scans.lengths), 0
    for number, scan in enumerate(scans):
        probabilities, attentions = [], []
        for kind, models in zip(ensemble.kinds, plain, strict=True):
            size = [len(scan.features)]
            said = [model((scan.features - kind.scaling.mean) * kind.scaling.scale, size) for model in models]
            probabilities.append(sum(torch.sigmoid(one.logit.double()) for one in said) / len(said))
            if kind.kind.attends:
                attentions.append(sum(one.attention for one in said) / len(said))
        assert torch.sigmoid(made.logit[number].double()).item() == pytest.approx(
            sum(probabilities).item() / 3, rel=1e-5
        )
        own = made.attention[begin : (begin := begin + len(scan.features))]
        torch.testing.assert_close(own, sum(attentions) / 2, rtol=1e-4, atol=1e-6)


def test_a_file_that_does_not_fit_its_weights_is_refused() -> None:
    ensemble, _ = two_kinds()
    about, state = ensemble.as_json(), ensemble.state_dict()
    scans = shifted_mean(3, seed=4, features=4)
    again = Ensemble.from_json(about, state)
    torch.testing.assert_close(again(scans.features, scans.lengths)[:2], ensemble(scans.features, scans.lengths)[:2])

    def wrong(**changes: object) -> dict[str, object]:
        return {
            **about,
            "kinds": [{**kind, **(changes if kind["method"] == "abmil" else {})} for kind in about["kinds"]],
        }

    for other, message in (
        (wrong(members=2), "2 members of abmil, but 1 in the weights"),
        (wrong(method="clam"), "the weights of clam do not fit 4 inputs"),
        (wrong(hidden=64), "the weights of abmil do not fit"),
        (wrong(hidden=10**12), "no weights are of 1000000000000 hidden units"),
        ({**about, "kinds": about["kinds"][2:]}, "do not fit|no members"),
        ({**about, "kinds": []}, "no members for attention, or none for probability"),
    ):
        with pytest.raises(ValueError, match=message):
            Ensemble.from_json(other, state)


def test_features_are_scaled_to_one_size_together_each_or_along_their_main_axes() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(900, 80, generator=generator) * torch.logspace(-2, 2, 80) + 5.0
    features[:, 3] = 2.0  # always the same
    scalings = fit_scalings(Bags(features, torch.full((90,), 10), torch.arange(90) % 2))
    for form, scaling in scalings.items():
        assert scaling(features).var(0, correction=0).sum().item() == pytest.approx(100.0, rel=1e-2), form
        assert scaling.inputs == (64 if form == "components" else 80)
    spread = scalings["each"](features).std(0, correction=0)
    torch.testing.assert_close(
        spread, torch.full((80,), (100 / 79) ** 0.5).where(torch.arange(80) != 3, 0.0), rtol=1e-3, atol=1e-3
    )
    wanted = PCA(64).fit_transform(scalings["together"](features).double().numpy())
    np.testing.assert_allclose(
        np.abs(scalings["components"](features).numpy())[:, :20], np.abs(wanted)[:, :20], atol=1e-2
    )
