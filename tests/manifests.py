"""Manifests in memory, for tests that need rows and no files."""

import numpy as np
import pyarrow as pa

from pipeline.manifest import SCHEMA, Manifest


def manifest_of(num_frames, *, labels=None, fps=25.0):
    """A manifest of videos with these lengths, as columns alone."""
    rows = len(num_frames)
    names = [f"A/v_{row:07d}.avi" for row in range(rows)]
    given_columns = {
        "video": names,
        "frames": names,
        "num_frames": num_frames,
        "label": np.zeros(rows) if labels is None else labels,
        "fps": np.broadcast_to(fps, rows),
    }
    columns = {
        one.name: pa.array(
            given_columns.get(one.name, ["ok"] * rows if one.type == pa.string() else np.zeros(rows))
        ).cast(one.type)
        for one in SCHEMA
    }
    metadata = {"format": "1", "dataset": '"drawn"', "classes": '["A", "B", "C"]', "spec": "{}"}
    return Manifest(pa.table(columns, schema=SCHEMA.with_metadata(metadata)))


def videos(num_videos):
    """A manifest of videos from 29 frames on, one more in each."""
    return manifest_of(29 + np.arange(num_videos) % 90)
