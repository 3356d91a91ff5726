"""Private names of `wrappers` that other optclip packages use."""

from optclip.wrappers._inner import transformation as transformation
