"""One thin command each: options are the fields of the specs, and a mistake is one clear line."""

import contextlib
import functools
import inspect
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import tyro

from pipeline.errors import PipelineError


def run(main: Callable[..., int], args: list[str] | None = None, *, resumes: bool = True) -> None:
    """Run a command from its own signature, and exit as every command here does.

    `resumes`: whether it goes on where it was interrupted, which it then says.

    0 when all is well, 1 when some videos failed, 2 for a mistake in its use, 130 when
    interrupted, 143 when told to end (SIGTERM, as `timeout` and schedulers send it): what was only
    for the moment is then removed, too. An error that a user can mend is one line on stderr, never a
    traceback.
    """
    try:
        with _raising_on_sigterm():
            status = main(**_parse(main, args))
    except (PipelineError, ValueError) as error:
        status = _complain(str(error))
    except BrokenPipeError:  # whoever read our output, like `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        status = _complain(f"{place}{error.strerror or error}")
    except KeyboardInterrupt as stop:
        kept = "what is finished is kept; run the same command again to go on"
        print(f"interrupted: {kept if resumes else 'nothing is kept of it'}", file=sys.stderr)
        status = 128 + (signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT)
    raise SystemExit(status)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: whoever cleans up after Ctrl-C does so now."""


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # forked off: it has nothing to clean up
            os._exit(128 + number)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(main: Callable[..., int], args: list[str] | None) -> dict[str, Any]:
    """The options as arguments of `main`; exits with 2, and one line, for a mistake."""

    @functools.wraps(main)
    def bind(**arguments: Any) -> dict[str, Any]:
        return arguments

    bind.__signature__ = inspect.signature(main)  # type: ignore[attr-defined]
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(bind, args=args, config=config, prog=f"python -m {_module(main)}")
    except SystemExit as end:
        if end.code == 2:
            _complain(_as_line(said.getvalue()))
        raise


def _module(main: Callable[..., int]) -> str:
    spec = getattr(sys.modules[main.__module__], "__spec__", None)
    return spec.name if spec is not None else main.__module__


def _as_line(box: str) -> str:
    """tyro draws a box around what is wrong, with advice to read the help at its end: the text alone."""
    title = re.match(r"╭─ (.+?) ─", box)
    text = " ".join(re.sub(r"[╭╮╰╯│─]+", " ", box).partition("For full helptext")[0].split())
    text = text.removeprefix(title[1]).strip() if title else text
    text = re.sub(r" Argument helptext:.*| Perhaps you meant: (--\S+).*", _hint, text)
    return f"{text}; see --help"


def _hint(found: re.Match[str]) -> str:
    return f", perhaps you meant {found[1]}" if found[1] else ""


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
