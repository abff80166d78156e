"""What every file may use: the error of a user. It imports nothing of ours."""


class UserError(ValueError):
    """A mistake that the user can mend. Its message is one line: the file or the setting, the value, and the
    way out. A command prints it without a traceback; every other error keeps its own."""
