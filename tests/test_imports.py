"""A module imports only what stands above it: data flows one way, and a cycle is never merged."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ORDER = [
    *("errors", "files", "seeds", "timing", "tiles", "jpeg", "planes", "folder", "manifest"),
    *("offline.lists", "offline.layouts", "offline.annotate", "offline.failures", "offline.decode"),
    *(
        "offline.jpeg_folder",
        "offline.frames",
        "offline.worker",
        "offline.plan",
        "offline.extract",
        "offline.memory",
    ),
    *("offline.catalog", "offline.verify", "offline.sample", "offline.sample_imu"),
    *("online.packfile", "online.pack", "online.counters", "online.pages", "online.ram", "online.store"),
    *("online.windows", "online.order", "online.samplers", "online.concat", "online.quotas"),
    *("online.distribution", "online.crops", "online.resample", "online.augment", "online.planar"),
    *("online.sources", "online.series_files", "online.series", "online.envi", "online.spe"),
    *("online.hyperspectral", "online.bands"),
    *(
        "online.lending",
        "online.collate",
        "online.columns",
        "online.extras",
        "online.readahead",
        "online.local",
        "online.reuse",
        "online.dataset",
        "online.loader",
        "online.device",
        "online.encoded",
        "online.device_decode",
    ),
    *("online.device_augment", "training.ranks", "training.recipe", "training.reports", "training.models"),
    *("training.checkpoint", "training.evaluate", "training.trainer", "training.fusion"),
    *("measure.machine", "measure.checks", "measure.disk", "measure.inventory", "measure.doctor"),
    *(
        "measure.sampling",
        "measure.verdict",
        "measure.steps",
        "measure.endless",
        "measure.parcels",
        "measure.profiler",
    ),
    *("measure.plots", "measure.tuner", "measure.tuned", "measure.trials"),
    *("measure.dataset_stats", "measure.folder_stats", "measure.findings", "measure.charts"),
    *("measure.pictures", "measure.shown_clips", "measure.preview", "measure.report"),
    *("measure.report_style", "measure.report_template", "measure.report_page"),
]


def imports_of(module: str) -> set[str]:
    tree = ast.parse((ROOT / "pipeline" / (module.replace(".", "/") + ".py")).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline."):
            base = node.module.removeprefix("pipeline.")
            names |= {base} if base in ORDER else {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.removeprefix("pipeline.") for a in node.names if a.name.startswith("pipeline.")}
    return names - {module}


def test_every_module_has_its_place():
    modules = (ROOT / "pipeline").rglob("*.py")
    names = {
        ".".join(path.relative_to(ROOT / "pipeline").with_suffix("").parts)
        for path in modules
        if path.name != "__init__.py"
    }
    assert names <= set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_what_stands_above_it(module):
    above = set(ORDER[: ORDER.index(module)])
    if not module.startswith("offline."):
        above = {name for name in above if not name.startswith("offline.")}
    if module.startswith("offline."):
        above = {name for name in above if not name.startswith("online.")}
    assert imports_of(module) <= above


@pytest.mark.parametrize(
    ("module", "foreign"),
    [
        ("pipeline.offline.catalog", {"torch"}),
        ("pipeline.offline.verify", {"torch"}),
        ("pipeline.manifest", {"torch", "av"}),
    ],
)
def test_what_the_offline_half_loads(module, foreign):
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not foreign & set(loaded.stdout.split())
