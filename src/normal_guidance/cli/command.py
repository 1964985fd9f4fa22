"""What every command shares: how its options are read from its docstring, its class, and what it prints as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, ParameterInfo

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import private_files, remove_left_drafts_of
from normal_guidance.base.records import valid_json
from normal_guidance.base.system import missing_extras, without_warnings
from normal_guidance.cli import endings

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to standard output.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more, also what libraries warn of.")]
Out = Annotated[Path, typer.Option("--out", "-o")]
Store = Annotated[Path, typer.Argument(help="Folder of a feature store.")]
Model = Annotated[Path, typer.Argument(help="Folder of nguide fit, of a bundle, or of a run.")]


def json_text(value: Any, *, indent: int | None = 2) -> str:
    return json.dumps(valid_json(value), indent=indent, allow_nan=False)


def print_json(value: Any) -> None:
    """Print a document; a command that also writes it to a file writes the same."""
    typer.echo(json_text(value))


def print_result(as_json: bool, document: Any, lines: Iterable[str]) -> None:
    """Print what a command made: for programs as JSON, or for people line by line."""
    if as_json:
        print_json(document)
    else:
        for line in lines:
            typer.echo(line)


# What the TAB key offers, here and in the commands' files, repeats tables whose modules import torch or pydicom, which
# takes a second; a test keeps them equal.

ENCODERS = ("vit-b16-imagenet", "efficientnet-lite0")
WINDOWS = ("head", "lung", "mediastinum", "abdomen", "adc", "percentile", "none")
SOURCES = ("rsna-ich", "rsna-pe", "rsna-at", "prostatex", "folder")
Complete = Callable[[str], list[str]]  # maps the text typed so far to its completions


def one_of(names: Sequence[str]) -> Complete:
    """Return a function that completes one name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def some_of(names: Sequence[str], *whole: str) -> Complete:
    """Return a function that completes the last of several names, with commas between; `whole` words stand alone."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        offered = names if comma else (*whole, *names)
        return [f"{before}{comma}{name}" for name in offered if name.startswith(last) and name not in taken]

    return complete


# Commands whose results name patients that are being treated; only the user who runs one may read what it writes.
# Commands on datasets (index, split, encode, ...) follow the umask: research groups share their folders.
PRIVATE = ("predict",)

NEEDS = {
    "demo": ("dicom", "encoders", "viewer"),
    "encode": ("dicom", "encoders"),
    "index": ("dicom",),
    "node": ("encoders", "node"),
    "phantom": ("dicom",),
    "view": ("viewer",),
}
"""The extras without which a command can do nothing; others need one for some options or data, and say so then."""


OTHER_COMMANDS = {
    "train": "nguide fit STORE -o MODEL makes a model; nguide sweep STORE -o RUNS trains methods over a grid",
    "import": "nguide store import FILES -o STORE reads features of your own",
    "show": "nguide store show STORE",
    "verify": "nguide store verify STORE",
    "serve": "nguide view shows results in the browser; nguide node answers DICOM",
}
"""What to use in place of commands that people try and that do not exist."""


class PlainFlags:
    """Leaves out the type of a flag in the help: it takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class CommandGroup(PlainFlags, TyperGroup):
    """A group of commands."""


def make_group(about: str, cls: type[CommandGroup] = CommandGroup, *, help_without_words: bool = True) -> typer.Typer:
    """Make a group such as `nguide store`."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(help=about, cls=cls, no_args_is_help=help_without_words, context_settings=names)


# The docstring of a command is its help.  What its options mean stands under "Args:", or under the title of the panel
# in which the help shows them; the signature says the rest.


def add_command(
    group: typer.Typer, command: Callable[..., None], name: str | None = None, *, about: str = "", panel: str = ""
) -> None:
    """Add a command, with the options that its signature and docstring declare; `about` is its line in `panel`."""
    # A parameter without a default is an argument, and a flag is off by default.  Instead of `typer.Option`, an
    # annotation may hold what completes the value.  A dataclass stands for options that several commands share.
    parameters, own = list(_parameters(command)), "verbose" in signature(command).parameters
    if not own:
        parameters.append(Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=Verbose))
    shared: dict[str, Any] = {key: kind for key, kind in get_type_hints(command).items() if is_dataclass(kind)}

    @wraps(command)
    def run(**given: Any) -> None:
        for key, kind in shared.items():
            given[key] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        with nullcontext() if given["verbose"] else without_warnings():
            command(**given if own else {name: value for name, value in given.items() if name != "verbose"})

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    words = read_help(command)[0]
    group.command(name, help=words, short_help=about or None, rich_help_panel=panel or None, cls=Command)(run)


def read_help(command: Any) -> tuple[str, dict[str, tuple[str, str | None]]]:
    """Return a docstring's paragraphs, each on one line, and of each option the help and the panel."""
    paragraphs, options = [], {}
    for paragraph in cleandoc(command.__doc__ or "").split("\n\n"):
        title, _, section = paragraph.partition(":\n    ")
        if not section:
            paragraphs.append(" ".join(paragraph.split()))
            continue
        for entry in re.split(r"\n    (?! )", section):
            name, _, text = entry.partition(": ")
            options[name] = " ".join(text.split()), None if title == "Args" else title
    return "\n\n".join(paragraphs), options


def _parameters(command: Any) -> Iterator[Parameter]:
    """Yield the options of a command, or of a dataclass, as typer reads them."""
    options, kinds = read_help(command)[1], get_type_hints(command, include_extras=True)
    if is_dataclass(command):
        defaults = {field.name: field.default for field in fields(command)}
    else:
        defaults = {name: parameter.default for name, parameter in signature(command).parameters.items()}
    for name, default in defaults.items():
        if is_dataclass(kinds[name]):
            yield from _parameters(kinds[name])
        elif name == "context":
            yield Parameter(name, Parameter.KEYWORD_ONLY, annotation=typer.Context)
        else:
            kind = _described(name, kinds[name], default, *options.get(name, ("", None)))
            yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _described(name: str, annotation: Any, default: Any, text: str, panel: str | None) -> Any:
    """Return a parameter's annotation with its option or argument, and the help in it."""
    marks = getattr(annotation, "__metadata__", ())
    info: Any = next((copy(mark) for mark in marks if isinstance(mark, ParameterInfo)), None)
    if info is None:
        flag = [f"--{name.replace('_', '-')}"] if default is False else []
        info = typer.Argument() if default is Parameter.empty else typer.Option(*flag)
    if isinstance(info, ArgumentInfo) and info.metavar is None:
        info.metavar = name.upper()
    info.help, info.rich_help_panel = text or info.help, panel or info.rich_help_panel
    info.autocompletion = next((mark for mark in marks if callable(mark)), info.autocompletion)
    return Annotated[get_args(annotation)[0] if marks else annotation, info]


class Command(PlainFlags, TyperCommand):
    """A command with its extras, whose name and options `endings` knows, so that it can say how to go on."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:  # Any: the class differs between releases of typer
        try:
            if not ctx.resilient_parsing:
                self._refuse_repeated(ctx, args)
            return super().parse_args(ctx, args)
        except Exception as error:
            hint = _hint(ctx, error)
            if hint:
                said = getattr(error, "message", "").rstrip(".")
                error.message = f"{said}. {hint}" if said else hint  # type: ignore[attr-defined]
            raise

    def _refuse_repeated(self, ctx: Any, args: list[str]) -> None:
        """Refuse an option that is given several times and of which only the last would count."""
        parser, options = self.make_parser(ctx), {}
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and not param.multiple:
                every = options[param.name] = copy(param)
                every.multiple = True
                every.add_to_parser(parser, ctx)
        given = parser.parse_args(list(args))[0]
        for name, param in options.items():
            values = given.get(name, ())
            if len(values) > 1 and not (param.is_flag and len(set(values)) == 1):
                times = f"{len(values)} times ({', '.join(map(str, values))})"
                raise UserError(f"{max(param.opts, key=len)} is given {times}, and only the last counts; give it once")

    def invoke(self, ctx: Any) -> Any:
        name = ctx.command_path.removeprefix(ctx.find_root().command_path).strip()
        endings.begin(name, ctx.params)
        need_extras(f"nguide {name}", *NEEDS.get(name, ()))
        if ctx.params.get("out") is not None and not ctx.params.get("dry_run"):
            remove_left_drafts_of(Path(ctx.params["out"]))  # text in typer before 0.29
        for line in lacking_lines(ctx.params):
            typer.echo(line, err=True)
        with private_files() if name in PRIVATE else nullcontext():
            return super().invoke(ctx)


def _hint(ctx: Any, error: Exception) -> str:
    """Return what to do about a word that a command does not take, or misses; empty if there is nothing to say."""
    if wrong := getattr(error.__cause__, "errors", None):  # typer's message of such a value does not repeat it
        return f"{wrong()[0]['input']!r} was given."
    option = getattr(error, "option_name", None)
    # Another error has an option's name too: that of one without its value.
    if type(error).__name__ == "NoSuchOption" and not getattr(error, "possibilities", None):
        commands = getattr(ctx.find_root().command, "commands", {})
        have = [name for name, other in commands.items() if any(option in param.opts for param in other.params)]
        return f"nguide {ctx.info_name} does not have it; {', '.join(have)} have" if have else ""
    said = getattr(error, "message", None) or ""
    takes_split = any("--split" in param.opts for param in ctx.command.params)
    if "unexpected extra argument" in said and takes_split and any(kind in said for kind in (".csv", ".parquet")):
        return "A table of parts goes behind --split."
    missing = getattr(getattr(error, "param", None), "name", None)
    source = ctx.params.get("source")
    if ctx.info_name == "index" and missing == "root" and source not in SOURCES:
        return (
            f"Give the layout first: nguide index folder {source} --table labels.csv -o INDEX, or one of "
            f"{', '.join(SOURCES)}."
        )
    return ""


def need_extras(what: str, *extras: str) -> None:
    """Raise a UserError with the one command that brings all of these extras, if some are not installed."""
    missing = missing_extras(*extras)
    if missing:
        from normal_guidance.base.system import install_package

        named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        raise UserError(
            f"{what} needs the extra{'s' if len(missing) > 1 else ''} {named}, not installed here; "
            f"{install_package(*missing)}"
        )


def lacking_lines(options: Mapping[str, Any]) -> list[str]:
    """Return a line for each store among the options that lacks scans, except for the one that is written."""
    lines = []
    given = [value if isinstance(value, list | tuple) else [value] for name, value in options.items() if name != "out"]
    words = [word for several in given for word in several if isinstance(word, str | Path)]
    for path in dict.fromkeys(map(Path, words)):
        if os.path.isfile(path / "store.json"):  # any text may stand here; this one never raises
            from normal_guidance.scans.features.store import LACKING, read_store_file

            with suppress(UserError):  # the command itself says what is wrong with it
                lacking = read_store_file(path).provenance.get(LACKING, 0)
                if lacking:
                    lines.append(
                        f"{path} lacks {lacking} scans of its index, which could not be read; its problems.csv says "
                        "why, and the same nguide encode takes them up"
                    )
    return lines
