"""`nguide view`: scans beside what methods attend to, on a page of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from normal_guidance.viewer.gallery import Gallery


def view(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What nguide experiment, nguide sweep or nguide predict wrote.")
    ],
    index: Annotated[
        Path | None,
        typer.Option(help="What nguide index made: adds images and slice labels. New scans need none."),
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Feature store: adds the window that the encoder saw.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="On this machine. Default: 8765, or a free one.")
    ] = None,
) -> None:
    """Look at scans: slices, the attention of each method along them, and the truth.

    Serves a page to this machine only, for whoever has the address that is printed; reads, and never writes.
    """
    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.viewer.gallery import open_gallery
    from normal_guidance.viewer.server import serve

    console = make_console()
    gallery = open_gallery(folder, index, store)
    if not len(gallery):
        raise UserError(f"{folder}: no scan in it was predicted; its summary.csv says why")
    say(console, f"{folder}: {len(gallery)} scans, {len(gallery.splits)} splits; images: {_images(gallery)}")

    def announce(url: str) -> None:
        say(console, f"Open {url}")
        say(console, "Ctrl-C ends it.")

    serve(gallery, port, announce)


def _images(gallery: Gallery) -> str:
    from normal_guidance.viewer.gallery import is_anonymous

    if gallery.manifest is not None:
        return "yes"
    if is_anonymous(gallery.folder):
        return "no, anonymous results do not say where the scans lie; predict without --anonymize for them"
    return "no, give --index INDEX for them"
