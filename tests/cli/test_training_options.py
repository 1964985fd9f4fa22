"""One set of options for sweep, experiment and reproduce; names of arguments; names of options before."""

from dataclasses import fields

import pytest
import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.commands import app
from normal_guidance.cli.options import TrainingOptions
from normal_guidance.sweep.config import (
    Config,
    grid,
    grid_of_method,
    paper_config,
)

COMMANDS = ("sweep", "experiment", "reproduce")


SEEN = ("opts", "secondary_opts", "help", "default", "hidden", "rich_help_panel")


def parameters(command: str) -> dict[str, object]:
    return {one.name: one for one in typer.main.get_command(app).commands[command].params}


def test_three_commands_have_the_same_options_in_the_same_order():
    shared = [field.name for field in fields(TrainingOptions)]
    first = parameters("sweep")
    for command in COMMANDS:
        options = parameters(command)
        assert [name for name in options if name in shared] == shared
        for name in shared:
            seen = [(getattr(option, fact), fact) for fact in SEEN for option in (options[name], first[name])]
            assert seen[::2] == seen[1::2]
            assert not options[name].hidden


def test_the_paper_s_protocol_is_not_the_default():
    assert TrainingOptions().paper_protocol() == paper_config("ng")
    assert TrainingOptions().axes() == {}
    assert grid_of_method(TrainingOptions().paper_protocol()) == grid(paper_config("ng"))
    assert TrainingOptions().protocol(10_000) == Config("ng")
    assert (Config("ng").patience, Config("ng").train_above_val) == (50, False)


def test_the_batch_fits_the_scans_unless_it_is_given():
    assert [TrainingOptions().protocol(scans).batch_size for scans in (3, 54, 130, 256)] == [3, 8, 32, 64]
    assert TrainingOptions(batch_size=7).protocol(54).batch_size == 7


def test_given_options_replace_those_of_either_protocol():
    given = TrainingOptions(patience=0, train_above_val=False, epochs=9, modes=2)
    for protocol in (given.protocol(500), given.paper_protocol()):
        assert (protocol.patience, protocol.train_above_val, protocol.epochs, protocol.modes) == (None, False, 9, 2)


def test_the_optimizer_is_an_option_of_either_protocol():
    options = {"optimizer": "adamw", "weight_decay": 0.01, "schedule": "cosine", "class_weights": True}
    given = TrainingOptions(**options)
    for protocol in (given.protocol(500), given.paper_protocol()):
        assert {name: getattr(protocol, name) for name in options} == options


def test_a_study_takes_one_value_of_each_guide():
    assert TrainingOptions(guidance_weight="0.1").study_axes() == {"guidance_weight": [0.1]}
    for name in ("guidance_weight", "divergence"):
        value = "0.1,1" if name == "guidance_weight" else "forward_kl,reverse_kl"
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}: this command takes one value"):
            TrainingOptions(**{name: value}).study_axes()


def test_every_folder_that_is_made_must_be_named():
    """`demo` runs without arguments; `describe` prints, and makes a folder where one is named."""
    optional = {
        name
        for name in typer.main.get_command(app).commands
        for one in getattr(typer.main.get_command(app).commands[name], "params", ())
        if "--out" in one.opts and not one.required
    }
    assert optional == {"demo", "describe"}


def test_arguments_are_upper_case():
    groups = [typer.main.get_command(app)]
    for group in groups:
        for command in group.commands.values():
            if hasattr(command, "commands"):
                groups.append(command)
                continue
            for one in command.params:
                if one.param_type_name == "argument":
                    assert (one.metavar or "none").isupper(), (command.name, one.name)
