"""What other packages of optclip use of `functional`, beside its public names."""

from optclip.functional._clip_by import clip_by as clip_by
from optclip.functional._clip_by import raise_if_exchanged as raise_if_exchanged
