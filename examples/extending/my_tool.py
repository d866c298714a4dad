"""A tool of your own: `env.tools.use: [{name: "examples.extending.my_tool:days_between"}]`."""

from datetime import date


def days_between(first: str, second: str) -> int:
    """Count the days from one date to another.

    Args:
        first: a date such as 2024-02-28
        second: another date
    """
    return (date.fromisoformat(second) - date.fromisoformat(first)).days
