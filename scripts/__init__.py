"""One thin command each: options are the fields of the specs, and a mistake is one clear line."""

import sys
from collections.abc import Callable

import tyro

from pipeline.errors import PipelineError


def run(main: Callable[..., int], args: list[str] | None = None) -> None:
    """Run a command from its own signature, and exit as every command here does.

    0 when all is well, 1 when some videos failed, 2 for a mistake in its use, 130 when
    interrupted. An error that a user can mend is one line on stderr, never a traceback.
    """
    try:
        status = tyro.cli(main, args=args, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff))
    except (PipelineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except OSError as error:
        place = f" {error.filename}:" if error.filename else ""
        print(f"error:{place} {error.strerror or error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept; run the same command again to go on", file=sys.stderr)
        status = 130
    raise SystemExit(status)
