"""The error type for mistakes a user can fix."""


class MergeError(ValueError):
    """A mistake in the input: one sentence saying what is wrong, where, what was expected and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class UnwrittenError(MergeError):
    """The result cannot be written, for instance because the disk is full; what was written is of use."""
