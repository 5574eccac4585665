"""The errors that a user can mend. Entry points print their text alone, without a traceback."""

from difflib import get_close_matches


class UserError(Exception):
    """Something outside the code is wrong: a file, a key, a value. The text says which and what would be right."""


class ConfigError(UserError):
    """One or more sentences about a configuration file, each with file, key, value and what is allowed."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def choices(value: object, allowed) -> str:
    """`did you mean 'madry'? allowed: madry, standard, trades`, for the end of an error sentence."""
    allowed = [str(name) for name in allowed]
    if not allowed:
        return "none is defined"
    nearest = get_close_matches(str(value), allowed, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}allowed: {', '.join(allowed)}"


class Interrupted(Exception):
    """A run was asked to stop and has saved all it did; the same command goes on from there."""
