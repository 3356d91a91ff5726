"""Cut one panel of a plot of each notebook and example for the gallery.

`python -m docs.plots_and_tables.thumbnails` writes `docs/images/thumbnails`, from the
plots that the notebooks store and from `docs/images`, and the image that other sites
show with a link to this one. Run it after a notebook or a figure has changed, and look
at the result: a legend may have moved.
"""

import base64
import io
import pathlib

import nbformat
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
CARD = ROOT / "docs" / "_static" / "card.png"
SIZE = 480, 288
# Plots need few colors, and a palette makes files small.
COLORS = 64
# The number of a plot among those of its notebook or the name of a figure, and the
# corners of a part of one panel, without axes and legends: left, top, right and bottom
# as fractions of the plot.
PARTS = {
    "01_quickstart": (0, (0.10, 0.08, 0.80, 0.85)),
    "02_choosing_a_threshold": (0, (0.067, 0.09, 0.485, 0.845)),
    "03_adaptive_clipping": (0, (0.382, 0.11, 0.638, 0.44)),
    "04_sharded_training": (0, (0.085, 0.26, 0.985, 0.835)),
    "05_custom_clip": (0, (0.457, 0.17, 0.99, 0.85)),
    "06_from_tensorflow_and_pytorch": (0, (0.10, 0.085, 0.985, 0.70)),
    "07_choosing_a_method": (11, (0.13, 0.095, 0.812, 0.835)),
    "08_attention_and_singular_values": (0, (0.774, 0.19, 0.975, 0.70)),
    "09_private_training": (0, (0.25, 0.09, 0.648, 0.83)),
    "10_black_box": (0, (0.20, 0.10, 0.45, 0.835)),
    "train_gpt": ("gpt", (0.125, 0.2, 0.96, 0.445)),
    "train_char_rnn": ("char_rnn", (0.33, 0.035, 0.99, 0.425)),
    "train_backward": ("backward", (0.28, 0.07, 0.99, 0.295)),
    "train_muon": ("muon_qk_clip", (0.345, 0.05, 0.985, 0.395)),
    "train_sharded": (1, (0.105, 0.515, 0.985, 0.77)),
}
LOGO = {
    "#56b4e9": [(16, 2), (20.4, 11.5), (11.6, 11.5)],
    "#0081c6": [(10.2, 17.5), (21.8, 17.5), (28, 30), (4, 30)],
    "#e0691c": [(1, 13), (31, 13), (31, 16), (1, 16)],
}
NOTEBOOK = {"train_sharded": "04_sharded_training"}


def stored_plots(notebook):
    """Return the plots that a notebook stores."""
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4).cells
    data = [out.get("data", {}) for cell in cells for out in cell.get("outputs", [])]
    return [base64.b64decode(each["image/png"]) for each in data if "image/png" in each]


def source(name, plot):
    """Return the plot that contains a thumbnail."""
    if isinstance(plot, str):
        content = (IMAGES / f"{plot}.png").read_bytes()
    else:
        content = stored_plots(NOTEBOOK.get(name, name))[plot]
    return Image.open(io.BytesIO(content)).convert("RGB")


def part(image, corners):
    """Return a part of a plot in the size of a thumbnail."""
    box = [round(c * image.size[k % 2]) for k, c in enumerate(corners)]
    return image.crop(box).resize(SIZE, Image.Resampling.LANCZOS)


def card():
    """Return the image of links to the site: its name and the figure of the GPT."""
    image = Image.new("RGB", (1200, 630), "white")
    draw = ImageDraw.Draw(image)
    # The shapes and colors of logo.svg.
    for color, corners in LOGO.items():
        draw.polygon([(40 + 5 * x, 110 + 5 * y) for x, y in corners], color)
    draw.text((52, 290), "optclip", "black", font(96))
    draw.text((56, 420), "Gradient clipping\nfor JAX", "#444444", font(44))
    figure = Image.open(IMAGES / "gpt.png").convert("RGB")
    figure.thumbnail((640, 600), Image.Resampling.LANCZOS)
    image.paste(figure, (1180 - figure.width, 315 - figure.height // 2))
    return image.quantize(COLORS)


def font(size):
    """Return the font of the plots."""
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


def main():
    folder = IMAGES / "thumbnails"
    folder.mkdir(exist_ok=True)
    for name, (plot, corners) in PARTS.items():
        small = part(source(name, plot), corners)
        path = folder / f"{name}.png"
        small.quantize(COLORS).save(path, optimize=True)
        print(path.name, path.stat().st_size // 1000, "kB")
    card().save(CARD, optimize=True)


if __name__ == "__main__":
    main()
