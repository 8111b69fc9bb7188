"""The error type for mistakes a user can fix."""


class UserError(Exception):
    """A mistake in a user's input: one sentence saying what is wrong, where, and what to do.

    Command lines print the message without a traceback and exit with code 2.
    """
