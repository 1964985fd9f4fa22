"""`nguide view`: show scans and the attention of methods on a page of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli import endings

if TYPE_CHECKING:
    from normal_guidance.clinic.viewer.gallery import Gallery


def view(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that nguide experiment, sweep, fit or predict wrote.")
    ],
    index: Annotated[
        Path | None,
        typer.Option(help="Folder that nguide index made: adds images and slice labels. Predicted scans need none."),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of a feature store: adds the window that the encoder saw.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port on this machine. Default: 8765, or a free one.")
    ] = None,
) -> None:
    """Look at scans: slices, the attention of each method along them, and the slice labels.

    The page is served to this machine only, and opens with the printed address only. Nothing is written.
    """
    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.clinic.viewer.gallery import open_gallery
    from normal_guidance.clinic.viewer.server import serve

    console = make_console()
    gallery = open_gallery(folder, index, store)
    if not len(gallery):
        raise UserError(f"{folder}: no scan in it was predicted; its summary.csv says why")
    splits = f"{len(gallery.splits)} split{'' if len(gallery.splits) == 1 else 's'}"
    say(console, f"{folder}: {len(gallery)} scans, {splits}; images: {_images(gallery)}")

    def announce(url: str) -> None:
        say(console, f"Open {url}")
        say(console, "Press Ctrl-C to stop.")

    with endings.until_ctrl_c():
        serve(gallery, port, announce)


def _images(gallery: Gallery) -> str:
    from normal_guidance.clinic.viewer.gallery import is_anonymous

    if gallery.manifest is not None:
        return "yes"
    if is_anonymous(gallery.folder):
        return "no, anonymous results do not record where the scans are; predict without --anonymize to see them"
    return "no, give --index INDEX to see them"
