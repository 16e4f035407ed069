"""Clips of training as a sheet of pictures, and as a moving one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.files import replaced
from pipeline.measure.folder_stats import choose_evenly
from pipeline.measure.pictures import Picture, join_row
from pipeline.measure.shown_clips import ShownClip

_INK, _SOFT, _PAPER = (235, 238, 243), (150, 160, 175), (18, 22, 29)
_MARGIN_PX, _GAP_PX = 12, 2
_TITLE_PX, _TIME_PX = 15, 11
_MAX_GIF_PX = 1_200


def draw_sheet(clips: Sequence[ShownClip], *, max_frames: int = 16) -> Picture:
    """Each clip a row of its frames, evenly spaced where there are more than `max_frames`.

    Above a row stand class, video and first frame; below each frame its time in the video. The pixels are
    those of the clips: nothing is resized. uint8 (H, W, 3); ValueError for no clips.
    """
    if not clips:
        raise ValueError("a sheet needs at least one clip")
    rows = [_draw_row(clip, max_frames) for clip in clips]
    width = max(row.width for row in rows)
    sheet = Image.new("RGB", (width, sum(row.height for row in rows)), _PAPER)
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return np.asarray(sheet)


def _draw_row(clip: ShownClip, max_frames: int) -> Image.Image:
    places = choose_evenly(len(clip.pictures), max_frames)
    frames = join_row([clip.pictures[place] for place in places], gap_px=_GAP_PX)
    height, width = frames.shape[:2]
    title, times = _font(_TITLE_PX), _font(_TIME_PX)
    top = _MARGIN_PX + _TITLE_PX + 8
    row = Image.new("RGB", (width + 2 * _MARGIN_PX, top + height + _TIME_PX + 10), _PAPER)
    draw = ImageDraw.Draw(row)
    label = printable(clip.label)
    draw.text((_MARGIN_PX, _MARGIN_PX), label, _INK, font=title)
    after = _MARGIN_PX + title.getlength(label) + 12
    about = f"{printable(clip.video)}, from frame {clip.start}"
    draw.text((after, _MARGIN_PX), about, _SOFT, font=title)
    row.paste(Image.fromarray(frames), (_MARGIN_PX, top))
    step = (width + _GAP_PX) / len(places)
    for number, place in enumerate(places):
        at = (_MARGIN_PX + number * step, top + height + 4)
        draw.text(at, _time_that_fits(clip.times_s[place], step, times), _SOFT, font=times)
    return row


def _time_that_fits(time_s: float, width_px: float, font: ImageFont.FreeTypeFont) -> str:
    """A time with as many decimals as there is room for."""
    texts = (f"{time_s:.3f} s", f"{time_s:.2f}", f"{time_s:.1f}", f"{time_s:.0f}")
    return next((text for text in texts if font.getlength(text) < width_px - 3), "")


def draw_moving(clips: Sequence[ShownClip]) -> list[Picture]:
    """All clips side by side, one picture for each of their T frames, each with its class below.

    uint8 (H, W, 3), T of them; at most 1,200 px wide where more than one clip is in a row.
    """
    if not clips:
        raise ValueError("a moving picture needs at least one clip")
    height, width = clips[0].pictures[0].shape[:2]
    step_x, step_y = width + _GAP_PX, height + _TIME_PX + 8
    columns = min(round(np.ceil(np.sqrt(len(clips) * step_y / step_x))), max(_MAX_GIF_PX // step_x, 1))
    back = Image.new("RGB", (columns * step_x, -(-len(clips) // columns) * step_y), _PAPER)
    draw, font = ImageDraw.Draw(back), _font(_TIME_PX)
    places = [(number % columns * step_x, number // columns * step_y) for number in range(len(clips))]
    for (left, top), clip in zip(places, clips, strict=True):
        draw.text((left + 2, top + height + 2), _cut(printable(clip.label), width - 4, font), _INK, font=font)
    pictures = []
    for place in range(len(clips[0].pictures)):
        picture = np.array(back)
        for (left, top), clip in zip(places, clips, strict=True):
            picture[top : top + height, left : left + width] = clip.pictures[place]
        pictures.append(picture)
    return pictures


def frame_duration_ms(clips: Sequence[ShownClip]) -> int:
    """The median time from one frame of a clip to the next, in a GIF's steps of 10 ms, at least 20.

    Frames that begin a short video again count for nothing.
    """
    gaps_s = np.concatenate([np.diff(clip.times_s) for clip in clips])
    ahead = gaps_s[gaps_s > 0]
    return max(round(float(np.median(ahead)) * 100) * 10, 20) if len(ahead) else 100


def write_png(path: Path, picture: Picture) -> None:
    """Write a picture, whole or not at all; the same picture gives the same bytes."""
    with replaced(path) as beside:
        Image.fromarray(picture).save(beside, format="PNG", optimize=True)


def write_gif(path: Path, pictures: Sequence[Picture], *, duration_ms: int) -> None:
    """Write pictures as a GIF that plays for ever, whole or not at all."""
    # One palette for all: with one for each frame, what stands still flickers.
    strip = Image.fromarray(np.concatenate([picture[::2, ::2] for picture in pictures]))
    palette = strip.quantize(255, method=Image.Quantize.MEDIANCUT)
    first, *others = [Image.fromarray(picture).quantize(palette=palette) for picture in pictures]
    with replaced(path) as beside:
        first.save(
            beside,
            format="GIF",
            save_all=True,
            append_images=others,
            duration=duration_ms,
            loop=0,
            optimize=False,
        )


def _cut(text: str, width_px: float, font: ImageFont.FreeTypeFont) -> str:
    """As much of a text as there is room for."""
    if font.getlength(text) <= width_px:
        return text
    kept = next((n for n in range(len(text), 0, -1) if font.getlength(text[:n] + "...") <= width_px), 0)
    return text[:kept] + "..."


def printable(text: str) -> str:
    """On one line, whatever a file is called."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _font(size_px: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise TypeError("Pillow was built without FreeType")
    return font
