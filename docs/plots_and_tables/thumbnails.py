"""Shrink a plot of each notebook and example to a thumbnail for the gallery.

`python -m docs.plots_and_tables.thumbnails` writes `docs/images/thumbnails`, from the
plots that the notebooks store and from `docs/images`.
"""

import base64
import io
import pathlib

import nbformat
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTH = 480
# Plots need few colors, and a palette makes files small.
COLORS = 64
# The number of a plot among those of its notebook.
PLOTS = {
    "01_quickstart": 0,
    "02_choosing_a_threshold": 0,
    "03_adaptive_clipping": 0,
    "04_sharded_training": 0,
    "05_custom_clip": 0,
    "06_from_tensorflow_and_pytorch": 0,
    "07_choosing_a_method": 11,
    "08_attention_and_singular_values": 0,
    "09_private_training": 0,
    "10_black_box": 0,
}
EXAMPLES = {
    "train_gpt": "gpt",
    "train_char_rnn": "char_rnn",
    "train_backward": "backward",
    "train_muon": "muon_qk_clip",
}


def plots(notebook):
    """Return the plots that a notebook stores."""
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4).cells
    data = [out.get("data", {}) for cell in cells for out in cell.get("outputs", [])]
    return [base64.b64decode(each["image/png"]) for each in data if "image/png" in each]


def sources():
    """Return the plot of each thumbnail by its name."""
    images = {name: plots(name)[number] for name, number in PLOTS.items()}
    images["train_sharded"] = plots("04_sharded_training")[1]
    for name, image in EXAMPLES.items():
        images[name] = (IMAGES / f"{image}.png").read_bytes()
    return images


def main():
    folder = IMAGES / "thumbnails"
    folder.mkdir(exist_ok=True)
    for name, content in sources().items():
        image = Image.open(io.BytesIO(content)).convert("RGB")
        height = round(image.height * WIDTH / image.width)
        small = image.resize((WIDTH, height), Image.Resampling.LANCZOS)
        path = folder / f"{name}.png"
        small.quantize(COLORS).save(path, optimize=True)
        print(path.name, path.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main()
