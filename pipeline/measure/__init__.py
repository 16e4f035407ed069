"""What a machine and a loader do, and what to change first. These are the names that users need."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.measure.profiler import Profile, profile_loader
    from pipeline.measure.steps import timed
    from pipeline.measure.tuner import tune

__all__ = ["Profile", "profile_loader", "timed", "tune"]

_PLACES = {"Profile": "profiler", "profile_loader": "profiler", "timed": "steps", "tune": "tuner"}


def __getattr__(name: str) -> Any:
    """Import on use: what looks at a machine whose torch is broken must not load it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
