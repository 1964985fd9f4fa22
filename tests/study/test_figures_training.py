"""Learning curves and the grid tell what history.parquet holds, read back from a run that was really trained."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from normal_guidance.base.errors import UserError
from normal_guidance.show.figure_style import METHOD_COLORS
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.figures.training import (
    NONE,
    VALUE,
    WINNER,
    draw_grid,
    draw_learning_curves,
    plot_grid,
    plot_learning_curves,
    selected_epochs,
)
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.run import write_history
from normal_guidance.sweep.sweep import Sweep, sweep

COLUMNS = ("loss", "train_auroc", "val_auroc")


@pytest.fixture(scope="module")
def result() -> Sweep:
    train, val = (shifted_mean(64, seed, features=8, shift=1.0) for seed in (1, 2))
    configs = grid(Config("abmil", epochs=6, batch_size=16), lr=(0.1, 0.01, 1e-4), l1=(1.0, 0.01, 0.0))
    return sweep(configs, train, val)


@pytest.fixture
def history(result: Sweep, tmp_path: Path) -> pd.DataFrame:
    write_history(tmp_path, result)
    return pd.read_parquet(tmp_path / "history.parquet")


def without_epoch(history: pd.DataFrame, *configs: int) -> pd.DataFrame:
    return history.assign(selected=history["selected"] & ~history["config"].isin(configs))


def corners(panel: Axes, gid: str) -> set[tuple[float, float]]:
    return {patch.get_xy() for patch in panel.patches if patch.get_gid() == gid}


def test_the_winner_is_the_sweeps(history: pd.DataFrame, result: Sweep):
    first = selected_epochs(history).iloc[0]
    (winner,) = result.winners
    assert (first["config"], first["epoch"], first["val_auroc"]) == (winner.number, winner.epoch, winner.val_auroc)


def test_of_equal_configurations_the_first_wins_where_the_winner_is_not_named(history: pd.DataFrame):
    equal = history.assign(val_auroc=0.75).drop(columns="winner")
    assert selected_epochs(equal)["config"].iloc[0] == history.loc[history["selected"], "config"].min()


def test_curves_of_all_configurations_are_drawn_and_the_winners_is_marked(history: pd.DataFrame, result: Sweep):
    (winner,) = result.winners
    figure = plot_learning_curves(history, "ng")
    assert [panel.get_title() for panel in figure.axes] == ["training loss", "training AUROC", "validation AUROC"]
    for panel, column in zip(figure.axes, COLUMNS, strict=True):
        *others, own, mark = panel.lines
        by_config = [one[column].to_numpy() for _, one in history.groupby("config")]
        assert np.array_equal(own.get_ydata(), by_config.pop(winner.number))
        assert own.get_color() == METHOD_COLORS["ng"]
        assert np.array_equal([line.get_ydata() for line in others], by_config)
        assert {line.get_color() for line in others} == {"0.75"}
        assert all(line.get_linewidth() < own.get_linewidth() for line in others)
        at = history[(history["config"] == winner.number) & (history["epoch"] == winner.epoch)].iloc[0]
        assert (*mark.get_xdata(), *mark.get_ydata()) == (winner.epoch, at[column])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(words) == 3
    assert f"learning rate {winner.config.lr:g}, L1 {winner.config.l1:g}" in words[1]
    assert f"selected epoch {winner.epoch}, " in words[2]


def test_long_training_has_a_logarithmic_axis(history: pd.DataFrame):
    assert plot_learning_curves(history, "ng").axes[0].get_xscale() == "linear"
    assert plot_learning_curves(history.assign(epoch=20 * history["epoch"]), "ng").axes[2].get_xscale() == "log"


def test_a_configuration_that_diverged_does_not_flatten_the_others(history: pd.DataFrame, result: Sweep):
    lost = (result.winners[0].number + 1) % len(result.configs)
    usual = history["loss"].median()
    for value in (1e30, np.inf, np.nan):
        history.loc[(history["config"] == lost) & (history["epoch"] > 2), "loss"] = value
        panel = plot_learning_curves(history, "ng").axes[0]
        assert panel.get_ylim()[1] < 2000 * usual
        own = panel.lines[-2].get_ydata()
        assert panel.get_ylim()[0] < own.min() <= own.max() < panel.get_ylim()[1]


def test_a_run_without_winner_says_so(history: pd.DataFrame, tmp_path: Path):
    nobody = history.assign(selected=False)
    figure = plot_learning_curves(nobody, "ng")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["no configuration has a selectable epoch"]
    assert {line.get_color() for panel in figure.axes for line in panel.lines} == {"0.75"}
    panel = plot_grid(nobody).axes[0]
    assert len(corners(panel, NONE)) == 9
    assert not corners(panel, VALUE) | corners(panel, WINNER)
    assert draw_grid(nobody, tmp_path / "grid.svg").exists()


def test_the_grid_shows_each_configurations_best_selectable_epoch(history: pd.DataFrame, result: Sweep):
    panel = plot_grid(history).axes[0]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "0.01", "1"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["0.0001", "0.01", "0.1"]
    drawn = {text.get_position(): text.get_text() for text in panel.texts}
    hatched = corners(panel, NONE)
    for number, config in enumerate(result.configs):
        place = ([0.0, 0.01, 1.0].index(config.l1), [1e-4, 0.01, 0.1].index(config.lr))
        own = history[history["config"] == number]
        selectable = own[own["train_auroc"] > own["val_auroc"]]
        if selectable.empty:
            assert (place[0] - 0.5, place[1] - 0.5) in hatched
        else:
            assert float(drawn[place]) == pytest.approx(selectable["val_auroc"].max(), abs=0.00051)
    assert len(drawn) + len(hatched) == 9
    best = result.winners[0].config
    corner = ([0.0, 0.01, 1.0].index(best.l1) - 0.5, [1e-4, 0.01, 0.1].index(best.lr) - 0.5)
    assert corners(panel, WINNER) == {corner}


def test_only_the_cell_without_an_epoch_is_hatched(history: pd.DataFrame, result: Sweep):
    everywhere = history.assign(selected=history["epoch"] == 3)
    number = next(i for i, config in enumerate(result.configs) if (config.lr, config.l1) == (0.1, 0.01))
    panel = plot_grid(without_epoch(everywhere, number)).axes[0]
    (cell,) = [patch for patch in panel.patches if patch.get_hatch()]
    assert cell.get_xy() == (0.5, 1.5)  # L1 .01 is the second column, learning rate .1 the third row
    assert (1, 2) not in {text.get_position() for text in panel.texts}
    assert not [patch for patch in plot_grid(everywhere).axes[0].patches if patch.get_hatch()]


def test_what_was_not_trained_is_blank(history: pd.DataFrame):
    panel = plot_grid(history[history["config"] != 0]).axes[0]
    assert len(corners(panel, VALUE) | corners(panel, NONE)) == 8


def test_several_studies_in_one_history_are_refused(history: pd.DataFrame, tmp_path: Path):
    both = pd.concat([history, history.assign(guidance_weight=10.0)])
    with pytest.raises(UserError, match="2 groups that differ in divergence, guidance_weight, seed"):
        draw_learning_curves(both, "ng", tmp_path / "a.png")
    with pytest.raises(UserError, match="no column 'selected'"):
        plot_grid(history.drop(columns="selected"))
    assert draw_learning_curves(history, "ng", tmp_path / "a.png").exists()
