"""Criteria without slice labels: by hand, against scikit-learn and SciPy, and on toys whose attention is known."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.layout import Layout
from normal_guidance.core.metrics import localization
from normal_guidance.core.models import CenteredGaussian, EvidenceMIL, Prediction
from normal_guidance.errors import UserError
from normal_guidance.evaluation import criteria as module
from normal_guidance.evaluation.criteria import CRITERIA, Answers, agreement, ask, criteria
from normal_guidance.simulate.semi_synthetic import shifted_mean
from normal_guidance.training.fit import predict

Scores = Callable[[Bags], Tensor]


def toy(scores: Scores, scale: float = 1.0, offset: float = 0.0) -> module.Predict:
    """A classifier that looks at all slices (the mean of feature 0) and says it looked where `scores` are high."""

    def answer(bags: Bags) -> Prediction:
        layout: Layout = bags.layout
        log_a = layout.log_softmax(layout.fold(scores(bags)))
        logit = layout.pad(bags.features[:, 0]).sum(1) / bags.lengths
        return Prediction(scale * logit + offset, layout.restore(log_a.exp()), layout.restore(log_a[:, None]))

    return answer


def smooth_evidence(bags: Bags) -> Tensor:
    """Log-attention of bells over feature 0: about where the block is."""
    model = EvidenceMIL(1, bells=True)
    with torch.no_grad():
        model.classifier.weight.fill_(1.0)
        return predict(model, bags).log_attention[0]


def nothing(bags: Bags) -> Tensor:
    return torch.zeros(len(bags.features))


def middle(bags: Bags) -> Tensor:
    return CenteredGaussian()(bags.features, bags.layout).log_attention[0].float()


def noise(bags: Bags) -> Tensor:
    """Bells anywhere, the same for the same scan whatever its features are scaled by."""
    model = EvidenceMIL(1, bells=True)
    with torch.no_grad():
        model.classifier.weight.fill_(1.0)
        hidden = torch.frac(1e4 * bags.features.sin().abs()) - 0.5
        return predict(model, Bags(3 * hidden, bags.lengths, bags.labels)).log_attention[0]


@pytest.fixture(scope="module")
def scans() -> Bags:
    return shifted_mean(600, seed=12, features=1, shift=1.0)


def test_cut_scans_by_hand() -> None:
    """Attention .7 and .2 on slices 1 and 2 of four: half of it lies on slice 1 alone."""
    features = torch.tensor([[1.0], [10.0], [3.0], [4.0], [2.0], [0.0], [5.0]])
    bags = Bags(features, torch.tensor([4, 1, 2]), torch.tensor([1, 1, 0]))
    weights = torch.tensor([0.05, 0.7, 0.2, 0.05, 1.0, 0.9, 0.1]).log()

    def scores(asked: Bags) -> Tensor:
        return weights if len(asked.features) == 7 else torch.zeros(len(asked.features))

    answers = ask(toy(scores), bags)
    assert answers.left_out == 1, "nothing is left of a scan of one slice"
    assert answers.labels.tolist() == [1, 0]
    assert answers.whole.tolist() == [4.5, 2.5]
    assert answers.kept.tolist() == [10.0, 0.0]
    assert answers.removed.tolist() == pytest.approx([8 / 3, 5.0])
    # Without any one slice, the mean of the other three is one of these; so their means lie between.
    assert 8 / 3 <= answers.elsewhere[0] <= 17 / 3
    assert {round(float(value), 6) for value in answers.elsewhere[1:] * 4} <= {0.0, 5.0, 10.0, 15.0, 20.0}


def test_numbers_by_hand() -> None:
    one = partial(torch.tensor, dtype=torch.float64)
    answers = Answers(
        labels=torch.tensor([0, 0, 1, 1]),
        whole=one([0.0, 2.0, 2.0, 4.0]),
        kept=one([0.0, 1.0, 2.0, 3.0]),
        removed=one([0.0, 1.0, 0.5, 0.0]),
        elsewhere=one([0.0, 2.0, 1.5, 3.0]),
        left_out=0,
    )
    values = {name: criterion(answers) for name, criterion in CRITERIA.items()}
    assert values["kept"] == 1.0
    assert values["removed"] == pytest.approx(1 - (0.5 + 1 + 0 + 0) / 4)
    assert values["contrast"] == pytest.approx(1.0 - (0.5 + 1 + 0 + 0) / 4)
    assert values["deletion"] == pytest.approx(((1.5 - 0.5) + 3.0) / 2 / math.sqrt(8 / 3))


OF_SLICES = {"share": 0.3, "of": "slices"}
"""As many slices of a scan as its block fills, on average, from every model."""


@pytest.mark.parametrize("cut", [{}, OF_SLICES], ids=["attention", "slices"])
def test_attention_on_the_evidence_is_above_none_and_inverted_attention_below(
    cut: dict[str, object], scans: Bags
) -> None:
    """All four classify alike; they differ in where they say they looked."""
    right = criteria(toy(smooth_evidence), scans, **cut)
    wrong = criteria(toy(lambda bags: -smooth_evidence(bags)), scans, **cut)
    without = [criteria(toy(scores), scans, **cut) for scores in (nothing, middle)]
    for name in CRITERIA:
        if name == "removed" and not cut:
            continue  # uniform attention has half of the scan removed: see the test of sharpness
        if not name.startswith("kept"):  # the least evidence of a scan is evidence, too: it may classify quite well
            assert wrong[name] < min(one[name] for one in without), name
        assert max(one[name] for one in without) < right[name], name


def test_the_better_attention_localizes_the_higher_the_criterion(scans: Bags) -> None:
    found, values = [], []
    for share in (-1.0, 0.0, 0.25, 0.5, 1.0):

        def scores(bags: Bags, share: float = share) -> Tensor:
            return share * smooth_evidence(bags) + (1 - abs(share)) * noise(bags)

        found.append(localization(scores(scans), scans.slice_labels, scans.lengths).mean_auroc.item())
        values.append(criteria(toy(scores), scans, **OF_SLICES))
    assert found == sorted(found)
    assert found[0] < 0.4 < 0.8 < found[-1], "the toys do not differ enough"
    for name in CRITERIA:
        of_toys = [one[name] for one in values]
        assert spearmanr(found, of_toys).statistic > 0.85, (name, of_toys)


def test_sharper_attention_of_the_same_order_has_less_removed(scans: Bags) -> None:
    """Why there are two cuts: by a share of the attention, sharpness alone changes what `removed` says."""
    soft, sharp = (toy(lambda bags, by=by: by * smooth_evidence(bags)) for by in (0.3, 3.0))
    removed = [criteria(one, scans)["removed"] for one in (soft, sharp)]
    assert removed[1] < removed[0] - 0.05
    removed = [criteria(one, scans, **OF_SLICES)["removed"] for one in (soft, sharp)]
    assert removed[1] == pytest.approx(removed[0], abs=0.03)


def test_the_most_attended_interval_is_the_best_of_all() -> None:
    lengths = torch.tensor([1, 2, 9, 30, 17])
    scans = Bags(torch.zeros(59, 1), lengths, torch.tensor([0, 1, 0, 1, 1]))
    attention = torch.rand(59)
    for share in (0.01, 0.3, 0.5, 0.99):
        first, length = module.most_attended(attention, scans, share)
        for scan, values in enumerate(attention.split(lengths.tolist())):
            size = max(1, min(round(share * len(values)), len(values) - 1))
            sums = [values[start : start + size].sum() for start in range(len(values) - size + 1)]
            assert length[scan] == size
            assert sums[first[scan]] == pytest.approx(max(sums))


def test_slice_labels_are_not_read(scans: Bags) -> None:
    blind = Bags(scans.features, scans.lengths, scans.labels, scan_ids=scans.scan_ids)

    def sees_nothing(bags: Bags) -> Prediction:
        assert bags.slice_labels is None
        return toy(smooth_evidence)(bags)

    assert criteria(sees_nothing, scans) == criteria(sees_nothing, blind)


def test_the_scale_of_logits_does_not_matter(scans: Bags) -> None:
    plain, scaled = criteria(toy(smooth_evidence), scans), criteria(toy(smooth_evidence, 64.0, -3.0), scans)
    assert scaled == pytest.approx(plain, rel=1e-4)


def test_kept_loss_is_a_logistic_regression() -> None:
    logits = torch.randn(200, dtype=torch.float64)
    labels = (torch.rand(200) < torch.sigmoid(2 * logits)).double()
    x = torch.stack([(logits - logits.mean()) / logits.std(), torch.ones(200)], 1).numpy()
    fitted = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10).fit(x, labels.numpy())
    p = torch.from_numpy(fitted.predict_proba(x)[:, 1])
    want = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean().item()
    assert module._refitted_loss(logits, labels) == pytest.approx(want, rel=1e-6)
    share = labels.mean().item()
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert module._refitted_loss(-logits, labels) == pytest.approx(entropy), "upside down says nothing"
    told_apart = module._refitted_loss(labels - 0.5, labels)
    assert 0 < told_apart < 0.05, "finite where a scale without end would be best"


def test_ranks_are_scipys() -> None:
    lengths, labels = torch.tensor([7, 30, 1, 12]), torch.tensor([1, 1, 1, 0])
    models = [torch.randint(0, 6, (50,)).double() for _ in range(3)]
    got = agreement(models, lengths, labels)
    pairs = [(one, two) for i, one in enumerate(models) for two in models[i + 1 :]]
    want = [
        spearmanr(a.split(lengths.tolist())[k], b.split(lengths.tolist())[k]).statistic
        for a, b in pairs
        for k in (0, 1)
    ]
    assert got.same == pytest.approx(sum(want) / len(want))
    assert got.scans == 2, "a scan of one slice and a negative one do not count"


def test_attention_that_depends_on_position_alone_agrees_with_every_scan(scans: Bags) -> None:
    evidence, center, flat = smooth_evidence(scans), middle(scans), nothing(scans)
    rough = [evidence + 0.1 * torch.randn(len(evidence)) for _ in range(2)]
    of_scan = agreement(rough, scans.lengths, scans.labels)
    of_place = agreement([center, center], scans.lengths, scans.labels)
    assert of_place.same == pytest.approx(1.0)
    assert of_place.beyond_position < 0.05
    assert agreement([flat, flat], scans.lengths, scans.labels).beyond_position == 0.0
    assert of_scan.beyond_position > 0.5


@pytest.mark.usefixtures("unchecked")
def test_mistakes_are_named(scans: Bags) -> None:
    with pytest.raises(UserError, match="cut by 'length' is unknown; choose one of attention, slices"):
        ask(toy(nothing), scans, of="length")
    with pytest.raises(UserError, match=r"share is 1.0; cut more than 0 and less"):
        ask(toy(nothing), scans, share=1.0, of="slices")
    with pytest.raises(UserError, match="0 of 3 scans are positive"):
        ask(toy(nothing), scans[scans.labels == 0][:3])
    with pytest.raises(UserError, match="no finite scan score"):
        ask(partial(predict, CenteredGaussian()), scans[:40])
    with pytest.raises(UserError, match=r"attention of \[5\] slices; agreement needs two models"):
        agreement([torch.rand(5)], torch.tensor([5]), torch.tensor([1]))
    with pytest.raises(UserError, match="1 positive scans have two slices or more"):
        agreement([torch.rand(5)] * 2, torch.tensor([4, 1]), torch.tensor([1, 1]))
    alone = Bags(torch.zeros(2, 1), torch.tensor([1, 1]), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="0 of 0 scans"):
        ask(toy(nothing), alone)
