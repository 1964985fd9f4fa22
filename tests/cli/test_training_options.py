"""One set of options for sweep, experiment and reproduce; names of arguments; names of options before."""

import re
from dataclasses import fields

from normal_guidance.cli.options import TrainingOptions
from normal_guidance.sweep.config import (
    Config,
    grid,
    grid_of_method,
    paper_config,
)
from small_command import every_command

COMMANDS = ("sweep", "experiment", "reproduce")


SEEN = ("opts", "secondary_opts", "help", "default", "hidden", "rich_help_panel")


def parameters(command: str) -> dict[str, object]:
    return {param.name: param for param in every_command()[command].params}


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
    options = {"optimizer": "adamw", "weight_decay": 0.01, "schedule": "cosine", "class_weights": True}
    options |= {"train_above_val": False, "epochs": 9, "modes": 2}
    given = TrainingOptions(patience=0, **options)
    for protocol in (given.protocol(500), given.paper_protocol()):
        assert {name: getattr(protocol, name) for name in options} == options
        assert protocol.patience is None


def test_every_folder_that_is_made_must_be_named():
    """`demo` runs without arguments, `fit` makes a folder model; `describe` prints, or makes a folder that is named."""
    made = [(name, param) for name, command in every_command().items() for param in command.params]
    optional = {name for name, param in made if "--out" in param.opts and not param.required}
    assert optional == {"demo", "describe", "fit"}


def test_arguments_are_upper_case_and_every_option_says_what_it_means():
    """A help text under another name than that of the parameter would be lost."""
    for name, command in every_command().items():
        for param in command.params:
            assert param.help or param.hidden, (name, param.name)
            if param.param_type_name == "argument":
                assert (param.metavar or "none").isupper(), (name, param.name)
        assert not re.search(r"[^\n]\n[^\n]", command.help), f"{name}: line breaks of a docstring are no paragraphs"
