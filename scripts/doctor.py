"""`make doctor`: what this machine and this dataset have, and what will hurt."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.measure.checks import Check, check_packages, conclude, count_of, format_check, next_step
from pipeline.measure.machine import read_packages
from scripts import run


def main(
    *,
    dataset: str = "sample",
    data: Path = Path("data"),
    manifests: Path = Path("manifests"),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Look at this machine, at the disk, and at what there is of DATASET; say what will hurt.

    A line for each check: ok, warning or error, what was found, and what to do. Changes nothing. The last
    line is the next thing to do. Exits with 1 where there is an error.

    Args:
        dataset: The folder below DATA to look at.
        data: Root of the datasets.
        manifests: Where the manifest is, as DATASET.parquet.
        json_file: Where to write the checks as JSON, too.
    """
    if Path(dataset).name != dataset or dataset in ("", "..", "."):
        raise PipelineError(
            f"no dataset is named {dataset!r}: expected a folder of {data}, by its name alone"
        )
    checks = []
    for check in _examine(dataset, data, manifests):
        print(format_check(check), flush=True)
        checks.append(check)
    verdict = conclude(checks, otherwise=f"make train DATASET={dataset}")
    print(verdict)
    if json_file is not None:
        write_text(json_file, _as_json(checks, verdict))
    return 1 if count_of(checks, "error") else 0


def _examine(dataset: str, data: Path, manifests: Path) -> Iterator[Check]:
    packages = check_packages(read_packages())
    yield from packages
    if count_of(packages, "error") == 0:
        from pipeline.measure.doctor import examine  # stands on these packages

        yield from examine(dataset, data=data, manifests=manifests)


def _as_json(checks: list[Check], verdict: str) -> str:
    step = next_step(checks)
    values = {
        "verdict": verdict,
        "errors": count_of(checks, "error"),
        "warnings": count_of(checks, "warning"),
        "next": None if step is None else {"check": step.name, "advice": step.advice},
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    run(main, resumes=False)
