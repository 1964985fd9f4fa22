"""The one exception that the command line treats specially."""


class UserError(ValueError):
    """A mistake the user can mend; the CLI prints it without a traceback, exit code 2.

    The message names the object, the value and the next action.

    >>> raise UserError("scan 'A17' has no slices; remove its row from the manifest")
    Traceback (most recent call last):
    normal_guidance.errors.UserError: scan 'A17' has no slices; remove its row from the manifest
    """
