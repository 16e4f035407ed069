"""The few errors that a caller may want to catch.

Each message is one line that names the place, what was found, and the next thing to do.
"""


class PipelineError(Exception):
    """Something that a user can mend: scripts print it as one line and exit with 2."""


class VideoError(PipelineError):
    """One video cannot become frames; the others can.

    `stage` says how far it came: `open`, `stream`, `decode`, `encode` or `worker`.
    """

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(stage, message)
        self.stage = stage
        self.message = message

    def __str__(self) -> str:
        return f"{self.stage}: {self.message}"


class FolderError(PipelineError):
    """A folder of frames, or its frames.json, is not what it should be."""


class ManifestError(PipelineError):
    """A manifest or a split list cannot be read, or contradicts itself."""


class StoreError(PipelineError):
    """The bytes of a clip cannot be had: stale pack, missing file, damaged JPEG."""


class SourceError(PipelineError):
    """A further source (series, cube) cannot be read or does not fit its video."""
