"""Options that do not go together, or do nothing alone: said before any work, not passed over."""

from eyas.errors import InputError

WHERE = "the command line"


def not_with(flag: str, **others: object) -> None:
    """Raises InputError where an option was given that `flag`, given too, leaves without effect."""
    if words := typed(others):
        raise InputError(
            wanted=f"{flag}, or {' and '.join(words)}",
            got="both",
            where=WHERE,
            next=f"one command with {flag}, one without",
        )


def needs(flag: str, there: bool, **others: object) -> None:
    """Raises InputError where an option was given that does nothing without `flag`."""
    if not there and (words := typed(others)):
        raise InputError(
            wanted=f"{flag}, which {' and '.join(words)} belongs to",
            got=f"no {flag}",
            where=WHERE,
            next=f"give {flag}, or leave {' and '.join(words)} out",
        )


def typed(options: dict[str, object]) -> list[str]:
    """The options that were given, as they are typed."""
    return [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
