"""One thin command each: options are the fields of the specs, and a mistake is one clear line."""

import contextlib
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import tyro

from pipeline.errors import PipelineError


def run(main: Callable[..., int], args: list[str] | None = None) -> None:
    """Run a command from its own signature, and exit as every command here does.

    0 when all is well, 1 when some videos failed, 2 for a mistake in its use, 130 when
    interrupted. An error that a user can mend is one line on stderr, never a traceback.
    """
    try:
        status = main(**_parse(main, args))
    except (PipelineError, ValueError) as error:
        status = _complain(str(error))
    except BrokenPipeError:  # whoever read our output, like `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        status = _complain(f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept; run the same command again to go on", file=sys.stderr)
        status = 130
    raise SystemExit(status)


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
