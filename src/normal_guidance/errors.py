"""The exception that the command line prints without a traceback."""


class UserError(ValueError):
    """A mistake that the user can correct; the command line prints it without a traceback and exits with 2.

    The message names the object, the value and the next action.

    >>> raise UserError("scan 'A17' has no slices; remove its row from the manifest")
    Traceback (most recent call last):
    normal_guidance.errors.UserError: scan 'A17' has no slices; remove its row from the manifest
    """
