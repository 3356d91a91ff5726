"""Names of `functional` that other packages of optclip use, besides the public ones."""

from optclip.functional._clip_by import clip_by as clip_by
from optclip.functional._clip_by import raise_if_exchanged as raise_if_exchanged
