"""Models, and the loop that trains them. These are the names that users need."""

from pipeline.training.evaluate import evaluate
from pipeline.training.models import build_model
from pipeline.training.recipe import TrainSpec
from pipeline.training.reports import EpochRow, EvalReport, FitReport
from pipeline.training.trainer import Hooks, fit

__all__ = ["EpochRow", "EvalReport", "FitReport", "Hooks", "TrainSpec", "build_model", "evaluate", "fit"]
