"""The two errors of fullshard's own that callers may meet beside ValueError."""


class StateError(RuntimeError):
    """A right call at the wrong moment."""


class InternalError(AssertionError):
    """A promise of fullshard itself was broken; please report it with the message."""


__all__ = ["InternalError", "StateError"]
