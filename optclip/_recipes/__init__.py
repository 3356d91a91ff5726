"""Published methods by the part of a step that they change.

Thresholds for the tree (`_adaptive`) or its parts (`_by_part`), fixed thresholds
(`_plain`), whole optimizers (`_optimizers`, `_spectra`), steps of an optimizer
(`_steps`), and skipped steps (`_skips`). `_recipe_options` holds their shared options.
"""
