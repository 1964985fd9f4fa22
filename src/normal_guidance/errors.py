"""The exception that the command line prints without a traceback, and texts in its messages."""


def shorten(text: str, most: int = 100) -> str:
    """A foreign text for a message, cut after so many characters.

    >>> shorten("x" * 10**6, 5)
    'xxxxx...'
    """
    return text if len(text) <= most else f"{text[:most]}..."


class UserError(ValueError):
    """A mistake that the user can correct; the command line prints it without a traceback and exits with 2.

    The message names the object, the value and the next action.

    >>> raise UserError("scan 'A17' has no slices; remove its row from the manifest")
    Traceback (most recent call last):
    normal_guidance.errors.UserError: scan 'A17' has no slices; remove its row from the manifest
    """
