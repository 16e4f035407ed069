"""Scores averaged over a video's clips, each video once, the same on any number of ranks."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.online import LoaderSpec, build_loader
from pipeline.online.device import Normalize, normalize_frames
from pipeline.training.evaluate import EvaluationError, evaluate
from pipeline.training.models import small_cnn
from pipeline.training.ranks import Ranks
from tests.training_runs import (
    CLASSES,
    held_out_loader,
    in_ranks,
    make_model,
    one_thread,
    training_loader,
    write_shades,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("shades")
    write_shades(root)
    return root


class Fixed(nn.Module):
    """Says the same of every clip."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = nn.Parameter(torch.tensor(outputs))

    def forward(self, frames):
        return self.outputs.expand(len(frames), -1)


class ByBrightness(nn.Module):
    """A class for each third of the greys."""

    def forward(self, frames):
        level = frames.mean(dim=(1, 2, 3, 4))
        return -((level[:, None] - torch.tensor([-1.0, 0.3, 1.7])) ** 2)


def slowly(model, loader):
    """Top-1, mean loss, and each video's class as predicted: one clip at a time."""
    scores, labels = {}, {}
    for ref in loader.sampler:
        clip = loader.dataset[ref]
        with torch.no_grad():
            outputs = model(normalize_frames(clip.frames[None], Normalize()))
        scores.setdefault(ref.video, []).append(torch.softmax(outputs[0].double(), dim=0))
        labels[ref.video] = clip.label
    means = {video: torch.stack(each).mean(dim=0) for video, each in scores.items()}
    predicted = {video: int(mean.argmax()) for video, mean in means.items()}
    right = np.mean([predicted[video] == label for video, label in labels.items()])
    return right, np.mean([-math.log(means[video][label]) for video, label in labels.items()]), predicted


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_a_report_is_what_clip_by_clip_gives(root, views, batch_size):
    model = make_model().eval()
    loader = held_out_loader(root, side="train", views=views, batch_size=batch_size)
    report = evaluate(model, loader, confusion=True)
    top1, loss, predicted = slowly(model, loader)
    assert (report.num_videos, report.clips_per_video) == (18, views)
    assert report.top1 == top1
    assert report.loss == pytest.approx(loss, rel=1e-5)
    table = np.zeros((3, 3), int)
    for video, label in enumerate(loader.dataset.columns.column("label").tolist()):
        table[label, predicted[video]] += 1
    assert np.array_equal(report.confusion, table)
    assert report.per_class == tuple(table.diagonal() / 6)


def test_what_can_be_told_by_eye_is_told(root):
    report = evaluate(ByBrightness(), held_out_loader(root, views=3))
    assert (report.top1, report.top5, report.per_class) == (1.0, 1.0, (1.0, 1.0, 1.0))
    assert report.confusion is None


def test_the_mean_of_the_scores_decides_and_not_that_of_the_outputs(root):
    # Two clips of 3 say class 0 with 0.6, one says class 1 with 1.0: the mean score is 0.4 against 0.6.
    class ByTurns(nn.Module):
        def forward(self, frames):
            said = [torch.tensor([0.6, 0.4]).log(), torch.tensor([0.6, 0.4]).log(), torch.tensor([0.0, 30.0])]
            return torch.stack([said[clip % 3] for clip in range(len(frames))])

    loader = held_out_loader(root, views=3, batch_size=3, rows=2)  # both of class 0
    report = evaluate(ByTurns(), loader, confusion=True)
    assert report.confusion == ((0, 2), (0, 0))
    assert report.loss == pytest.approx(-math.log(0.4))


def test_a_model_that_says_nothing_is_not_right_by_a_tie(root):
    report = evaluate(Fixed(*[0.5] * 9), held_out_loader(root))
    assert report.top1 == pytest.approx(1 / 3)  # class 0, which stands first
    assert report.top5 == 1.0  # 0, 1, 2 stand before 3 to 8
    assert report.loss == pytest.approx(math.log(9))
    assert report.per_class == (1.0, 0.0, 0.0, *[None] * 6)


@pytest.mark.parametrize(("better", "top5"), [(4, 1.0), (5, 0.0)])
def test_five_classes_are_the_top_five(root, better, top5):
    outputs = [0.0] * 3 + [1.0] * better
    assert evaluate(Fixed(*outputs), held_out_loader(root, rows=1)).top5 == top5


def test_scores_that_are_no_numbers_are_an_error_that_names_the_video(root):
    with pytest.raises(EvaluationError, match=r"Dark/v_Dark_g00_c01\.avi: the model's scores are not"):
        evaluate(Fixed(float("nan"), 0.0, 0.0), held_out_loader(root))


def test_a_label_beyond_the_model_is_an_error_that_names_the_video(root):
    with pytest.raises(EvaluationError, match=r"Light/v_Light_g00_c01\.avi has label 2, and the model 2"):
        evaluate(Fixed(0.0, 0.0), held_out_loader(root))


def test_two_passes_are_identical_and_leave_the_model_as_it_was(root):
    model = make_model().train()
    before = copy.deepcopy(model.state_dict())
    one, two = (evaluate(model, held_out_loader(root, views=2)) for _ in range(2))
    assert one == two
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_last_batch_has_the_shape_of_all_others(root):
    shapes = set()
    model = small_cnn(3, width=2)
    model.register_forward_pre_hook(
        lambda module, given: shapes.add(
            (given[0].shape, given[0].is_contiguous(memory_format=torch.channels_last_3d))
        )
    )
    evaluate(model, held_out_loader(root, batch_size=4))  # 6 videos
    assert shapes == {((4, 3, 4, 16, 16), True)}


def test_an_evaluation_that_is_told_to_stop_has_no_report(root):
    asked = []
    assert evaluate(make_model(), held_out_loader(root), should_stop=lambda: asked.append(1) or True) is None
    assert len(asked) <= 2  # after the first batch of two


def test_loaders_that_would_count_wrong_are_refused(root):
    with pytest.raises(ValueError, match="EvalSampler, got EpochSampler"):
        evaluate(make_model(), training_loader(root))
    of_two = held_out_loader(root)
    of_two.sampler.world = 2
    with pytest.raises(ValueError, match="the sampler is for rank 0 of 2, this is rank 0 of 1"):
        evaluate(make_model(), of_two)
    whole = held_out_loader(root)
    drops = build_loader(whole.dataset, whole.sampler, LoaderSpec(batch_size=4, workers=0, drop_last=True))
    with pytest.raises(ValueError, match="must not drop clips"):
        evaluate(make_model(), drops)


def test_a_loader_that_leaves_videos_out_is_an_error(root):
    loader = held_out_loader(root)
    loader.sampler.__class__ = type("Short", (type(loader.sampler),), {"__iter__": _without_the_last})
    with pytest.raises(EvaluationError, match="5 of 6 videos were counted"):
        evaluate(make_model(), loader)


def _without_the_last(self):
    refs = list(super(type(self), self).__iter__())
    return iter(refs[:-1])


def test_ranks_must_be_of_a_group_that_is_set_up():
    with pytest.raises(ValueError, match=r"torch\.distributed is not set up for 2 ranks"):
        Ranks(rank=1, world=2)
    with pytest.raises(ValueError, match="ranks must count from 0"):
        Ranks(rank=1, world=1)


def judge(ranks, root, out):
    """Reports of 18 videos, and of 3, of which some of 4 ranks have none."""
    loaders = [
        held_out_loader(root, ranks=ranks, side="train", views=3, batch_size=4),
        held_out_loader(root, ranks=ranks, rows=3),
    ]
    return [evaluate(make_model(), loader, ranks=ranks, confusion=True) for loader in loaders]


def test_any_number_of_ranks_gives_the_same_numbers(root, tmp_path):
    alone = judge(Ranks(), root, tmp_path)
    assert [report.num_videos for report in alone] == [18, 3]
    assert len(CLASSES) == len(alone[0].per_class)
    for world in (2, 4):
        assert in_ranks(judge, root, tmp_path / str(world), world) == [alone] * world


def stop_on_one(ranks, root, out):
    """Only the last rank is told to stop, and it has a video to judge."""
    return evaluate(
        make_model(), held_out_loader(root, ranks=ranks), ranks=ranks, should_stop=lambda: ranks.rank == 1
    )


def test_a_stop_of_one_rank_is_a_stop_of_all(root, tmp_path):
    assert in_ranks(stop_on_one, root, tmp_path, 2) == [None, None]
